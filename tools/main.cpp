#include <iostream>

#include "command_line.hpp"

int main(int argc, char** argv) {
  return moelith::tools::run_command_line({argv + (argc > 0 ? 1 : 0), argv + argc}, std::cout, std::cerr);
}

#include "gtest/gtest.h"

int main(int count, char** arguments) { return testing::internal::run_all(count, arguments); }

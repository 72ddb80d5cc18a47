// Runs the ranks of a group as child processes of a test.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace moelith::test {

// How a child ended.
struct Ended {
  bool returned = false;  // its body returned
  int signal = 0;         // that killed it; 0: none
  std::string text;       // what its body returned, or the exception's text
};

// A group's name that no other test has, of this process or another.
inline std::string fresh_group_name() {
  static std::atomic<int> number{0};
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

// Calls body(rank), which returns bytes for the parent, in a child process each. `meanwhile` is called with the
// children's process ids before they are waited for.
inline std::vector<Ended> fork_ranks(int ranks, const std::function<std::string(int rank)>& body,
                                     const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  std::vector<std::unique_ptr<std::FILE, int (*)(std::FILE*)>> files;
  for (int r = 0; r < ranks; ++r) files.emplace_back(std::tmpfile(), &std::fclose);
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    if (child < 0) {  // kill and waitpid take -1 for everybody
      for (pid_t started : children) kill(started, SIGKILL);
      throw std::runtime_error("fork failed");
    }
    if (child == 0) {
      int code = 0;
      std::string text;
      try {
        text = body(r);
      } catch (const std::exception& error) {
        text = error.what();
        code = 1;
      }
      std::fwrite(text.data(), 1, text.size(), files[r].get());
      std::fflush(files[r].get());
      _exit(code);  // nothing of the parent's is to be run or flushed here
    }
    children.push_back(child);
  }
  if (meanwhile) meanwhile(children);
  std::vector<Ended> all(ranks);
  for (int r = 0; r < ranks; ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    all[r].returned = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (WIFSIGNALED(status)) all[r].signal = WTERMSIG(status);
    std::rewind(files[r].get());
    char piece[4096];
    for (std::size_t n; (n = std::fread(piece, 1, sizeof piece, files[r].get())) > 0;) all[r].text.append(piece, n);
  }
  return all;
}

}  // namespace moelith::test

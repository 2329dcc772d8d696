// One worker of recovery.py: `recovery FOLDER`, under a launcher. After its
// first all_reduce each rank R of attempt A writes FOLDER/A-R: its process id
// and the steady clock in ns. The ranks of attempt 0 reduce until they are
// killed.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    const auto group = lockstep::init_process_group();
    auto tensor = torch::ones({1024});
    lockstep::all_reduce(tensor);
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const std::string attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
    const std::string file = std::string(argv[1]) + "/" + attempt + "-" +
                             std::to_string(lockstep::get_rank());
    std::ofstream(file + ".part")
        << getpid() << ' '
        << std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    std::filesystem::rename(file + ".part", file);
    while (attempt == "0") {
      lockstep::all_reduce(tensor.fill_(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}

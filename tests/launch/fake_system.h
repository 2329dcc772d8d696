#pragma once

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

namespace lockstep::internal::testing {

// A folder with the files of /sys and /proc that tell the CPUs and GPUs of a
// host.
class FakeSystem {
 public:
  explicit FakeSystem(std::filesystem::path root) : root_(std::move(root)) {}

  std::string root() const { return root_; }
  std::string system() const { return root_ / "sys/devices/system"; }

  // A host whose logical CPUs are numbered as Linux does on x86: first one of
  // each core, in the order of nodes, then the second ones.
  struct Host {
    int sockets = 1;
    int nodes_per_socket = 1;
    int caches_per_node = 1;
    int cores_per_cache = 1;
    int threads_per_core = 1;

    int nodes() const { return sockets * nodes_per_socket; }
    int cores_per_node() const { return caches_per_node * cores_per_cache; }
    int cores() const { return nodes() * cores_per_node(); }
    int cpus() const { return cores() * threads_per_core; }
  };

  void add_host(const Host& host) {
    std::string possible;
    for (int node = 0; node < host.nodes(); ++node) {
      write("node/node" + std::to_string(node) + "/cpulist",
            list(host, node * host.cores_per_node(), host.cores_per_node()));
      possible += (node > 0 ? "," : "") + std::to_string(node);
    }
    write("node/possible", possible);
    for (int cpu = 0; cpu < host.cpus(); ++cpu) add_cpu(host, cpu);
  }

  // `address` is that of its PCI device, as "0000:18:00.0".
  void add_gpu(const std::string& address, int node, const std::string& uuid) {
    write_file("sys/bus/pci/devices/" + address + "/numa_node",
               std::to_string(node));
    write_file("proc/driver/nvidia/gpus/" + address + "/information",
               "Model: \t\t NVIDIA H100\nGPU UUID: \t " + uuid + "\n");
  }

 private:
  void add_cpu(const Host& host, int cpu) {
    const int core = cpu % host.cores();
    const int complex = core / host.cores_per_cache;
    const int socket = core / (host.cores_per_node() * host.nodes_per_socket);
    const std::string folder = "cpu/cpu" + std::to_string(cpu);
    write(folder + "/topology/thread_siblings_list", list(host, core, 1));
    write(folder + "/topology/physical_package_id", std::to_string(socket));
    const std::string of_core = list(host, core, 1);
    const std::string of_complex =
        list(host, complex * host.cores_per_cache, host.cores_per_cache);
    const auto add_cache = [&](const char* index, const char* type,
                               const char* level, const std::string& sharing) {
      const std::string cache = folder + "/cache/index" + index;
      write(cache + "/type", type);
      write(cache + "/level", level);
      write(cache + "/shared_cpu_list", sharing);
    };
    add_cache("0", "Data", "1", of_core);
    add_cache("1", "Instruction", "4", list(host, 0, host.cores()));
    add_cache("2", "Unified", "3", of_complex);
  }

  // Returns the CPUs of `count` cores from `first` on, in sysfs's form.
  static std::string list(const Host& host, int first, int count) {
    std::string text;
    for (int thread = 0; thread < host.threads_per_core; ++thread) {
      const int begin = first + thread * host.cores();
      text += (thread > 0 ? "," : "") + std::to_string(begin);
      if (count > 1) text += "-" + std::to_string(begin + count - 1);
    }
    return text;
  }

  void write(const std::string& path, const std::string& text) {
    write_file("sys/devices/system/" + path, text);
  }
  void write_file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }

  std::filesystem::path root_;
};

}  // namespace lockstep::internal::testing

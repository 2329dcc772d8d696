// `lockstep run` beside the torchrun of the installed torch.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "lockstep/launch/process/cpu_topology.h"
#include "tests/launch/fake_system.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using Variables = std::map<std::string, std::string>;

constexpr std::chrono::seconds kAllowed{100};

class Torchrun : public LauncherTest {
 protected:
  void SetUp() override {
    if (!fs::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no Python with torch at " LOCKSTEP_TORCH_PYTHON;
    }
  }

  // Runs a worker under torchrun, or under `lockstep run`, and returns its
  // environment by rank.
  std::vector<Variables> environments(bool torchrun,
                                      std::vector<std::string> options,
                                      const ProgramSetup& setup, int ranks) {
    const fs::path folder = scratch() / (torchrun ? "torchrun" : "lockstep");
    fs::remove_all(folder);
    fs::create_directories(folder);
    // Without a log directory torchrun would leave a temporary one.
    options.push_back("--log-dir=" + (folder / "logs").string());
    std::vector<std::string> command{LOCKSTEP_BIN_DIR "/lockstep", "run"};
    if (torchrun) {
      command = {LOCKSTEP_TORCH_PYTHON, "-m", "torch.distributed.run"};
    }
    command.insert(command.end(), options.begin(), options.end());
    command.insert(command.end(),
                   {"--no-python", "/bin/sh", "-c",
                    "exec env -0 > " + folder.string() + "/$RANK"});
    const auto result = run_program(command, setup, kAllowed);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<Variables> all;
    for (int rank = 0; rank < ranks; ++rank) {
      std::string text = read_file(folder / std::to_string(rank));
      std::ranges::replace(text, '\n', ' ');
      std::ranges::replace(text, '\0', '\n');
      Variables& variables = all.emplace_back();
      for (const auto& line : lines(text)) {
        const size_t equals = line.find('=');
        variables[line.substr(0, equals)] = line.substr(equals + 1);
      }
    }
    return all;
  }

  void compare(const std::vector<std::string>& options, ProgramSetup setup,
               const std::set<std::string>& more);
};

// Variables that differ by design (docs/torchrun.md, "Differences from
// torchrun"): only in their values, and those that torchrun does not have.
const std::set<std::string> kOtherValues{
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"};
// LOCKSTEP_FLIGHT_DIR is another one, but these tests set it themselves.
const std::set<std::string> kOfLockstep{"LOCKSTEP_AGENT", "LOCKSTEP_STORE"};

void Torchrun::compare(const std::vector<std::string>& options,
                       ProgramSetup setup, const std::set<std::string>& more) {
  constexpr int kRanks = 2;
  // If no locale is given, Python sets one for its children.
  setup.environment.push_back("LC_ALL=C.UTF-8");
  const auto theirs = environments(true, options, setup, kRanks);
  const auto ours = environments(false, options, setup, kRanks);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    ASSERT_GT(theirs[rank].size(), 15u);
    std::set<std::string> expected_more = more;
    expected_more.insert(kOfLockstep.begin(), kOfLockstep.end());
    if (rank == 0) expected_more.insert("LOCKSTEP_MASTER_LISTEN_FD");
    for (const auto& [name, value] : theirs[rank]) {
      const auto own = ours[rank].find(name);
      if (own == ours[rank].end()) {
        ADD_FAILURE() << "only torchrun sets " << name << "=" << value;
      } else if (!kOtherValues.contains(name)) {
        EXPECT_EQ(own->second, value) << name;
      }
    }
    std::set<std::string> only_ours;
    for (const auto& [name, value] : ours[rank]) {
      if (!theirs[rank].contains(name)) only_ours.insert(name);
    }
    EXPECT_EQ(only_ours, expected_more);
  }
}

TEST_F(Torchrun, WorkersHaveTheSameVariables) {
  compare({"--nproc-per-node=2", "--max-restarts=3", "--role=trainer",
           "--rdzv-id=job7"},
          {}, {});
}

TEST_F(Torchrun, WorkersHaveTheSameVariablesWithEveryOptionThatSetsSome) {
  compare({"--standalone", "--nproc-per-node=2", "--virtual-local-rank",
           "--signals-to-handle=SIGTERM,SIGUSR1"},
          {.environment = {"OMP_NUM_THREADS=3", "CUDA_VISIBLE_DEVICES=6, 2",
                           "TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
                           "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${rank}]"}},
          {"LOCKSTEP_AGENT_PLACE"});
}

TEST_F(Torchrun, FilteredLinesAreTheSame) {
  const auto filtered = [&](std::vector<std::string> command) {
    const fs::path logs = scratch() / "logs";
    fs::remove_all(logs);
    const std::string script =
        "echo loss $RANK; echo other; echo 'a,b'; echo ab; "
        "echo loss >&2; echo warn $RANK >&2";
    command.insert(
        command.end(),
        {"--nproc-per-node=2", "--tee=3", "--local-ranks-filter=1",
         "--log-dir=" + logs.string(), "--duplicate-stdout-filters=loss,a,,b",
         "--duplicate-stderr-filters=warn", "--no-python", "/bin/sh", "-c",
         script});
    const auto result =
        run_program(command, {.environment = {"OMP_NUM_THREADS=1"}}, kAllowed);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::string all;
    for (const auto& run : fs::directory_iterator(logs)) {
      const fs::path attempt = run.path() / "attempt_0";
      all += read_file(attempt / "filtered_stdout.log") + "stderr\n" +
             read_file(attempt / "filtered_stderr.log");
    }
    return all;
  };
  const std::string theirs =
      filtered({LOCKSTEP_TORCH_PYTHON, "-m", "torch.distributed.run"});
  EXPECT_EQ(theirs,
            "[default1]:loss 1\n[default1]:a,b\nstderr\n[default1]:warn 1\n");
  EXPECT_EQ(filtered({LOCKSTEP_BIN_DIR "/lockstep", "run"}), theirs);
}

TEST_F(Torchrun, TableOfOptionsIsThatOfTheInstalledTorch) {
  const auto result = run_program(
      {LOCKSTEP_TORCH_PYTHON,
       LOCKSTEP_SOURCE_DIR "/tests/launch/torchrun_options.py",
       LOCKSTEP_SOURCE_DIR "/docs/torchrun.md", LOCKSTEP_BIN_DIR "/lockstep"},
      {}, kAllowed);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

TEST_F(Torchrun, RanksWithGpusAreBoundToTheSameCpus) {
  struct Case {
    FakeSystem::Host host;
    std::vector<int> node_of_gpu;
    std::set<int> without{};  // CPUs that the process may not use
  };
  const Case cases[] = {
      {{.sockets = 2,
        .nodes_per_socket = 2,
        .caches_per_node = 2,
        .cores_per_cache = 3,
        .threads_per_core = 2},
       {0, 1, 3, 3}},
      {{.sockets = 2, .caches_per_node = 2, .cores_per_cache = 4},
       {1, 1, 0, 1, 0},
       {0, 5, 9}},
      {{.cores_per_cache = 7}, {-1, -1, -1}},
      {{.cores_per_cache = 2, .threads_per_core = 2}, {-1, -1, -1}}};
  std::vector<std::string> command{
      LOCKSTEP_TORCH_PYTHON, LOCKSTEP_SOURCE_DIR "/tests/launch/numa_peer.py"};
  std::string ours;
  for (const Case& one : cases) {
    const fs::path root = scratch() / ("host" + std::to_string(command.size()));
    FakeSystem system(root);
    system.add_host(one.host);
    for (size_t gpu = 0; gpu < one.node_of_gpu.size(); ++gpu) {
      system.add_gpu("0000:" + std::to_string(gpu + 1) + "1:00.0",
                     one.node_of_gpu[gpu], "GPU-" + std::to_string(gpu));
    }
    std::set<int> allowed;
    std::string allowed_text;
    for (int cpu = 0; cpu < one.host.cpus(); ++cpu) {
      if (one.without.contains(cpu)) continue;
      allowed.insert(cpu);
      allowed_text += (allowed_text.empty() ? "" : ",") + std::to_string(cpu);
    }
    command.insert(command.end(), {root.string(), allowed_text});

    const CpuTopology topology = read_cpu_topology(allowed, system.system());
    for (const char* mode : {"node", "socket", "exclusive", "core-complex"}) {
      const int gpus = static_cast<int>(one.node_of_gpu.size());
      std::vector<std::set<int>> bound(one.node_of_gpu.size());
      try {
        bound = bind_to_cpus(parse_numa_binding(mode), topology,
                             numa_nodes_of_gpus(root), gpus);
      } catch (const std::invalid_argument&) {
      }
      for (int gpu = 0; gpu < gpus; ++gpu) {
        std::string cpus;
        for (const int cpu : bound[static_cast<size_t>(gpu)]) {
          cpus += (cpus.empty() ? "" : ",") + std::to_string(cpu);
        }
        ours += std::string(mode) + " " + std::to_string(gpu) + " " +
                (cpus.empty() ? "refused" : cpus) + "\n";
      }
    }
  }
  const auto peer = run_program(command, {}, kAllowed);
  ASSERT_EQ(peer.exit_code, 0) << peer.err;
  EXPECT_EQ(ours, peer.out);
}

}  // namespace
}  // namespace lockstep::internal::testing

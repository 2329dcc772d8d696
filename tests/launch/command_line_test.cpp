// Spellings of options, programs, and one clear line for each mistake.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

class CommandLine : public LauncherTest {
 protected:
  fs::path write_program(const std::string& name, const std::string& text,
                         bool executable = true) {
    const fs::path path = scratch() / name;
    std::ofstream(path) << text;
    if (executable) fs::permissions(path, fs::perms::owner_all);
    return path;
  }
};

TEST_F(CommandLine, TakesDashUnderscoreEqualsAndEnvironment) {
  const std::string script = "echo $RANK/$WORLD_SIZE";
  const std::string expected = "0/2\n1/2\n";
  const auto sorted = [](const std::string& text) {
    auto all = lines(text);
    std::sort(all.begin(), all.end());
    std::string joined;
    for (const auto& line : all) joined += line + "\n";
    return joined;
  };
  for (const auto& options : std::vector<std::vector<std::string>>{
           {"--nproc-per-node", "2"},
           {"--nproc_per_node", "2"},
           {"--nproc-per-node=2"},
           {"--nproc_per_node=2"},
           {"--nproc-per-node=2", "--"},
           {"--standalone", "--nnodes=1", "--nproc-per-node=2"},
           {"--nnodes=1:1", "--rdzv_backend=c10d",
            "--rdzv-endpoint=localhost:0", "--nproc-per-node=5",
            "--nproc-per-node=2"},
           {"--node_rank=0", "--rdzv_conf=join_timeout=60,is_host=true",
            "--local_addr=127.0.0.1", "--nproc-per-node=2"},
       }) {
    EXPECT_EQ(sorted(run_script(options, script).out), expected)
        << ::testing::PrintToString(options);
  }
  const auto result =
      run_script({}, script, {.environment = {"PET_NPROC_PER_NODE=2"}});
  EXPECT_EQ(sorted(result.out), expected) << result.err;
}

TEST_F(CommandLine, WhatFollowsTheProgramIsTheProgramsOwn) {
  const auto result = run({"--nproc-per-node=1", "echo", "--nproc-per-node=3",
                           "--help", "-m", "--", "run", "--no-such-option"});
  EXPECT_EQ(result.out,
            "--nproc-per-node=3 --help -m -- run --no-such-option\n");
}

TEST_F(CommandLine, CpuAndAutoCountTheCoresOfThisProcess) {
  const auto result = run_script({"--nproc-per-node=cpu"}, "echo $WORLD_SIZE");
  EXPECT_EQ(lines(result.out).front(),
            std::to_string(lines(result.out).size()));
}

TEST_F(CommandLine, HelpAndVersionSucceed) {
  EXPECT_EQ(run_command({"--help"}).exit_code, 0);
  EXPECT_THAT(run_command({"run", "--help"}).out,
              HasSubstr("--nproc-per-node"));
  EXPECT_THAT(run_command({"--version"}).out, HasSubstr("lockstep "));
}

// An option as the parser lists it: its names, and whether it takes a value.
struct ListedOption {
  std::vector<std::string> names;
  bool takes_value;
};

std::vector<ListedOption> listed_options(const std::string& help) {
  std::vector<ListedOption> options;
  for (const auto& line : lines(help)) {
    std::istringstream words(line);
    ListedOption option{{}, false};
    for (std::string word; words >> word && word.starts_with('-');) {
      option.names.push_back(word.substr(0, word.find(',')));
      if (word.back() != ',') {
        words >> word;
        option.takes_value = word == "VALUE";
        break;
      }
    }
    if (!option.names.empty()) options.push_back(option);
  }
  return options;
}

// "--rdzv-id=$SLURM_JOB_ID" with the variable unset: the first argument after
// it is the program, however the option treats an empty value.
TEST_F(CommandLine, EmptyValueOfAnOptionIsNotTheProgram) {
  const auto options = listed_options(run_command({"run", "--help"}).out);
  ASSERT_GT(options.size(), 20u);
  const fs::path other = write_program("other", "#!/bin/sh\ntouch $0.ran\n");
  const fs::path first =
      write_program("first", "#!/bin/sh\necho first $#; touch $0.ran\n");
  for (const auto& option : options) {
    if (option.names.back() == "--help") continue;
    for (const auto& name : option.names) {
      for (const bool apart : {false, true}) {
        if (apart && !option.takes_value) continue;
        std::vector<std::string> arguments{name + (apart ? "" : "=")};
        if (apart) arguments.push_back("");
        arguments.insert(arguments.end(), {first, other});
        const auto result = run(arguments);
        EXPECT_FALSE(fs::exists(other.string() + ".ran")) << name;
        if (result.exit_code == 0) {
          EXPECT_EQ(result.out, "first 1\n") << name;
        } else {
          EXPECT_EQ(result.exit_code, 2) << name << result.err;
          EXPECT_EQ(lines(result.err).size(), 1u) << name << result.err;
          EXPECT_THAT(result.err, AnyOf(HasSubstr(option.names.front()),
                                        HasSubstr(option.names.back())));
          EXPECT_EQ(result.out, "") << name;
        }
      }
    }
  }
  EXPECT_EQ(run({"--rdzv-id=", first, other}).exit_code, 0);
}

TEST_F(CommandLine, RendezvousKeysOfTorchrunAreSaidAndPassedOver) {
  const auto result =
      run({"--rdzv-conf=last_call_timeout=5,read_timeout=9,join_timeout=60",
           "true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines(result.err).size(), 2u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("last_call_timeout of --rdzv-conf"));
}

// torchrun: elastic/utils/api.py, macros.substitute.
TEST_F(CommandLine, LocalRankIsPutIntoTheProgramsArguments) {
  const auto result =
      run({"--nproc-per-node=2", "--no-python", "echo", "--rank=${local_rank}",
           "$local_rank", "$local_ranks", "${rank}", "a${local_rank}b", "$$"});
  auto all = lines(result.out);
  std::ranges::sort(all);
  EXPECT_THAT(all, ElementsAre("--rank=0 0 $local_ranks ${rank} a0b $$",
                               "--rank=1 1 $local_ranks ${rank} a1b $$"));
}

TEST_F(CommandLine, HelpIsAlsoACommandAndVersionHasAShortName) {
  EXPECT_EQ(run_command({"help"}).out, run_command({"--help"}).out);
  EXPECT_EQ(run_command({"help", "run"}).out,
            run_command({"run", "--help"}).out);
  EXPECT_EQ(run_command({"help", "inspect", "flight"}).out,
            run_command({"inspect", "flight", "--help"}).out);
  EXPECT_EQ(run_command({"help", "rum"}).exit_code, 2);
  EXPECT_EQ(run_command({"-V"}).out, run_command({"--version"}).out);
}

TEST_F(CommandLine, CompletionKnowsEveryCommandAndOption) {
  const auto script = run_command({"completion", "bash"});
  ASSERT_EQ(script.exit_code, 0) << script.err;
  const fs::path file = scratch() / "completion";
  std::ofstream(file) << script.out;
  // Returns what a shell offers to complete the last of these words.
  const auto offered = [&](const std::string& words) {
    const auto result =
        run_program({"/bin/bash", "-c",
                     ". " + file.string() + "; COMP_WORDS=(" + words +
                         "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); " +
                         "_lockstep; printf '%s\\n' \"${COMPREPLY[@]}\""});
    EXPECT_EQ(result.err, "") << words;
    return lines(result.out);
  };
  for (const char* command :
       {"run", "bench", "doctor", "inspect", "report", "completion", "help"}) {
    EXPECT_THAT(offered("lockstep ''"), Contains(command));
  }
  EXPECT_THAT(offered("lockstep --v"), ElementsAre("--version"));
  EXPECT_THAT(offered("lockstep inspect ''"), Contains("flight"));
  EXPECT_THAT(offered("lockstep inspect flight --js"), ElementsAre("--json"));
  EXPECT_THAT(offered("lockstep doctor --js"), ElementsAre("--json"));
  EXPECT_THAT(offered("lockstep report ''"), Contains("trace"));
  EXPECT_THAT(offered("lockstep report trace --o"), ElementsAre("--output"));
  EXPECT_THAT(offered("lockstep completion ''"), IsSupersetOf({"bash", "zsh"}));
  const auto run_options = offered("lockstep run --nnodes = 2 -m --");
  for (const auto& option :
       listed_options(run_command({"run", "--help"}).out)) {
    EXPECT_THAT(run_options, Contains(option.names.back()));
  }
  // The program's words are not completed.
  EXPECT_THAT(offered("lockstep run --nnodes 2 train --no"), ElementsAre(""));
  EXPECT_THAT(offered("lockstep run --nnodes train --no-"),
              ElementsAre("--no-python"));

  EXPECT_THAT(run_command({"completion", "zsh"}).out,
              HasSubstr("bashcompinit"));
  EXPECT_EQ(run_command({"completion", "fish"}).exit_code, 2);
}

struct Mistake {
  std::vector<std::string> arguments;
  int exit_code;
  std::string said;
  std::vector<std::string> environment{};
};

TEST_F(CommandLine, EachMistakeIsOneLineAndStartsNothing) {
  const std::string proof = (scratch() / "started").string();
  const std::string touch = "touch";
  const std::vector<Mistake> mistakes{
      {{}, 2, "subcommand is required"},
      {{"rum"}, 2, "unknown command \"rum\""},
      {{"--foo", "run", touch, proof}, 2, "unknown option \"--foo\""},
      {{"run"}, 2, "no program was given"},
      {{"run", "--foo", touch, proof}, 2, "unknown option --foo"},
      {{"run", "--nproc-per-node"}, 2, "--nproc-per-node"},
      {{"run", "--nproc-per-node=0", touch, proof}, 2, "is \"0\"; allowed"},
      {{"run", "--nproc-per-node=-1", touch, proof}, 2, "is \"-1\"; allowed"},
      {{"run", "--nproc-per-node=two", touch, proof}, 2, "\"auto\", \"cpu\""},
      {{"run", "--nproc-per-node=gpu", touch, proof},
       2,
       "GPU",
       {"CUDA_VISIBLE_DEVICES="}},
      {{"run", "--nnodes=0", touch, proof}, 2, "is \"0\"; allowed"},
      {{"run", "--nnodes=2", "--standalone", touch, proof}, 2, "--standalone"},
      {{"run", "--nnodes=2", "--node-rank=2", touch, proof}, 2, "from 0 to 1"},
      {{"run", "--nnodes=2", "--rdzv-backend=c10d", touch, proof},
       2,
       "--rdzv-endpoint=HOST"},
      {{"run", "--nnodes=2", "--rdzv-endpoint=[::1", touch, proof},
       2,
       "in brackets"},
      {{"run", "--nnodes=2", "--rdzv-endpoint=a:b", touch, proof},
       2,
       "port of --rdzv-endpoint is \"b\""},
      {{"run", "--nnodes=2", "--rdzv-endpoint=:29400", touch, proof},
       2,
       "allowed is HOST"},
      {{"run", "--nnodes=2", "--master-port=0", touch, proof}, 2, "port 0"},
      {{"run", "--rdzv-conf=last_call=3", touch, proof}, 2, "join_timeout"},
      {{"run", "--rdzv-conf=is_host=5", touch, proof}, 2, "true and false"},
      {{"run", "--nnodes=1:4", touch, proof}, 2, "not supported yet"},
      {{"run", "--node-rank=1", touch, proof}, 2, "can only be 0"},
      {{"run", "--rdzv-backend=etcd", touch, proof}, 2, "static and c10d"},
      {{"run", "--max-restarts=x", touch, proof}, 2, "--max-restarts"},
      {{"run", "--shutdown-timeout=-3", touch, proof}, 2, "from 0 to 86400"},
      {{"run", "--master-port=70000", touch, proof}, 2, "65535"},
      {{"run", "--master-addr=203.0.113.1", touch, proof}, 2, "of this host"},
      {{"run", "--tee=7", touch, proof}, 2, "--tee is \"7\""},
      {{"run", "--log-dir=/proc/nothing", touch, proof}, 2, "/proc/nothing"},
      {{"run", "--local-ranks-filter=a", touch, proof}, 2, "is \"a\""},
      {{"run", "--numa_binding=node", touch, proof}, 2, "not supported"},
      {{"run", touch, proof}, 2, "PET_RUN_PATH", {"PET_RUN_PATH=a"}},
      {{"run", touch, proof}, 2, "has \"a=b\"", {"PET_RDZV_CONF=a=b"}},
      {{"run", "-m", "--no-python", touch, proof}, 2, "exclude each other"},
      {{"run", "/no/such/program"}, 127, "/no/such/program: No such file"},
      {{"run", "no-such-program"}, 127, "not found in PATH"},
      {{"run", "missing.py"}, 127, "missing.py: No such file"},
      {{"run", "/etc/passwd"}, 126, "not executable"},
      {{"run", "/etc"}, 126, "is a directory"},
      {{"run", "-m", "module"}, 127, "/no/python", {"PYTHON_EXEC=/no/python"}},
  };
  for (const auto& mistake : mistakes) {
    const auto result =
        run_command(mistake.arguments, {.environment = mistake.environment});
    const std::string shown = ::testing::PrintToString(mistake.arguments);
    EXPECT_EQ(result.exit_code, mistake.exit_code) << shown;
    EXPECT_EQ(lines(result.err).size(), 1u) << shown << result.err;
    EXPECT_THAT(result.err, HasSubstr(mistake.said)) << shown;
    EXPECT_EQ(result.out, "") << shown;
    EXPECT_FALSE(fs::exists(proof)) << shown;
  }
}

TEST_F(CommandLine, ProgramThatTheKernelRefusesIsNamed) {
  const fs::path path = write_program("garbage", "\x01\x02 no program\n");
  auto result = run({path});
  EXPECT_EQ(result.exit_code, 126);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr(path.string()));

  const fs::path orphaned = write_program("orphaned", "#!/no/interpreter\n");
  result = run({orphaned});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("interpreter"));
}

TEST_F(CommandLine, PythonScriptsRunUnderPython) {
  if (std::system("command -v python3 >/dev/null") != 0) {
    GTEST_SKIP() << "no python3 in PATH";
  }
  const fs::path script = write_program(
      "train.py",
      "import os, sys\n"
      "print(os.environ['RANK'], sys.argv[1:], sys.stdout.write_through)\n",
      false);
  EXPECT_EQ(run({script, "--lr", "3"}).out, "0 ['--lr', '3'] True\n");
  EXPECT_EQ(run({"-m", "calendar", "--help"}).exit_code, 0);
  // --no-python runs the file itself, which has no execute permission.
  EXPECT_EQ(run({"--no-python", script}).exit_code, 126);
}

TEST_F(CommandLine, PortInUseIsOneLineWithAddressAndPort) {
  FileDescriptor taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* name = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(taken.get(), name, length), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  getsockname(taken.get(), name, &length);
  const std::string port = std::to_string(ntohs(address.sin_port));

  for (const auto& option :
       {"--master-port=" + port, "--rdzv-endpoint=127.0.0.1:" + port}) {
    const auto result = run({option, "true"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, HasSubstr("address 127.0.0.1 port " + port));
  }
}

TEST_F(CommandLine, BracketsOfAnIpv6AddressAreNotTheWorkers) {
  for (const char* option :
       {"--master-addr=[::1]", "--master-addr=::1", "--rdzv-endpoint=[::1]",
        "--rdzv-endpoint=[::1]:0", "--local-addr=::1"}) {
    EXPECT_EQ(run_script({option}, "echo $MASTER_ADDR").out, "::1\n") << option;
  }
}

TEST_F(CommandLine, GivenPortIsUsedInEveryRound) {
  // A port that was free a moment ago.
  const auto probe = run_script({}, "echo $MASTER_PORT");
  const std::string port = lines(probe.out).front();
  const auto result = run_script({"--master-port=" + port, "--max-restarts=1"},
                                 "echo $MASTER_PORT; exit 1");
  EXPECT_EQ(result.out, port + "\n" + port + "\n") << result.err;
}

}  // namespace
}  // namespace lockstep::internal::testing

// Spellings of options, programs, and one clear line for each mistake.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
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
TEST_F(CommandLine, OutputThatAFullDiskLosesIsAFailure) {
  for (const char* command : {"--help", "--version", "run --help"}) {
    RunningProgram shell({"/bin/sh", "-c",
                          "exec " LOCKSTEP_BIN_DIR "/lockstep " +
                              std::string(command) + " > /dev/full"},
                         {});
    const auto result = shell.finish();
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_THAT(result.err, HasSubstr("its output could not be written"));
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  }
}

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
  const auto result = run(
      {"--rdzv-conf=last_call_timeout=5,close_timeout=8,heartbeat_timeout=7,"
       "read_timeout=9, join_timeout = 60 ,store_type=tcp,is_host=True",
       "true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines(result.err).size(), 4u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("last_call_timeout of --rdzv-conf"));
}

// A value that each option refuses, or that shows in what is printed. All three
// ways to give it must do the same, and not what happens without the option.
TEST_F(CommandLine, EveryOptionHasThreeSpellings) {
  const std::map<std::string, std::string> values{
      {"--log-dir", "/proc/nothing"},
      {"--report", "/proc/nothing/report"},
      {"--rdzv-id", "job?"},
      {"--rdzv-endpoint", "a:b"},
      {"--master-addr", "203.0.113.1"},
      {"--local-addr", "203.0.113.1"}};
  const std::string show =
      "[ \"$TORCHELASTIC_RUN_ID\" != 'job?' ] || echo named; "
      "echo $ROLE_NAME $CUDA_VISIBLE_DEVICES";
  const auto outcome = [&](std::vector<std::string> options,
                           std::vector<std::string> environment) {
    const auto result = run_script(std::move(options), show,
                                   {.environment = std::move(environment)});
    // Further lines of a failure have process ids.
    return std::to_string(result.exit_code) + result.out +
           (result.err.empty() ? "" : lines(result.err).front());
  };
  const std::string plain = outcome({}, {});
  int tried = 0;
  for (const auto& option :
       listed_options(run_command({"run", "--help"}).out)) {
    const std::string name = option.names.back();
    std::string underscored = name;
    std::replace(underscored.begin() + 2, underscored.end(), '-', '_');
    std::string variable = "PET_" + underscored.substr(2);
    std::ranges::transform(variable, variable.begin(), ::toupper);
    if (!option.takes_value) {
      if (name == "--help") continue;
      const std::string expected = outcome({name}, {});
      EXPECT_EQ(outcome({underscored}, {}), expected) << name;
      EXPECT_EQ(outcome({}, {variable + "=1"}), expected) << variable;
      EXPECT_EQ(outcome({}, {variable + "=0"}), plain) << variable;
      continue;
    }
    const auto at = values.find(name);
    const std::string value = at == values.end() ? "?" : at->second;
    const std::string expected = outcome({name + "=" + value}, {});
    EXPECT_NE(expected, plain) << name;
    EXPECT_EQ(outcome({underscored, value}, {}), expected) << name;
    EXPECT_EQ(outcome({}, {variable + "=" + value}), expected) << variable;
    ++tried;
  }
  EXPECT_GE(tried, 29);
}

// A bug: the address of a Service of Kubernetes, which is on no host, was
// refused with one node, whose workers do not need it.
TEST_F(CommandLine, WithOneNodeAnAddressOfAnotherHostIsTaken) {
  const auto result =
      run_script({"--master-addr=203.0.113.1"}, "echo $MASTER_ADDR");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "127.0.0.1\n");
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("address 203.0.113.1 is not one of this"));
}

// A bug: values of templates and files, which end with a newline, were refused.
TEST_F(CommandLine, WhiteSpaceAroundNumbersOfVariablesIsNothing) {
  const auto result = run_script(
      {}, "echo $RANK of $WORLD_SIZE after $TORCHELASTIC_MAX_RESTARTS",
      {.environment = {"PET_NNODES= 1 : 1\n", "PET_NPROC_PER_NODE=1\n",
                       "PET_NODE_RANK= 0", "PET_MASTER_ADDR=127.0.0.1\n",
                       "PET_MASTER_PORT=0\r\n", "PET_MAX_RESTARTS=\t3 ",
                       "PET_SHUTDOWN_TIMEOUT=1.5\n", "PET_OMP_THREADS=auto\n",
                       "PET_RDZV_CONF= join_timeout=60\n"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "0 of 1 after 3\n");
}

TEST_F(CommandLine, OptionsOfTorchrunThatChangeNothingAreTaken) {
  for (const char* option : {"--start-method=fork", "--start_method=forkserver",
                             "--event-log-handler=null", "--logs-specs=default",
                             "--monitor-interval=5", "--rdzv-backend=c10d"}) {
    const auto result = run({option, "echo", "ran"});
    EXPECT_EQ(result.out, "ran\n") << option;
    EXPECT_EQ(result.err, "") << option;
  }
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

  EXPECT_EQ(run_command({"completion", "fish"}).exit_code, 2);
}

TEST_F(CommandLine, ZshOffersWhatBashDoes) {
  const std::string zsh = "/usr/bin/zsh";
  if (!fs::exists(zsh)) GTEST_SKIP() << "no zsh at " << zsh;
  const auto script = run_command({"completion", "zsh"});
  ASSERT_EQ(script.exit_code, 0) << script.err;
  const fs::path file = scratch() / "completion";
  std::ofstream(file) << script.out;
  write_program("lockstep", "#!/bin/sh\necho \"  --sizes $*\"\n");
  // Returns what is offered, and the line that zsh makes of `line` at the end.
  const auto offered = [&](const std::string& line) {
    const fs::path home = scratch() / "home";
    fs::remove_all(home);
    fs::create_directory(home);
    const auto result = run_program(
        {zsh, "-f", LOCKSTEP_SOURCE_DIR "/tests/launch/zsh_offers.zsh", file,
         line},
        {.environment = {"HOME=" + home.string(),
                         "PATH=" + scratch().string() + ":/usr/bin:/bin"},
         .folder = home});
    EXPECT_EQ(result.exit_code, 0) << line << result.err;
    EXPECT_EQ(result.err, "") << line;
    return lines(result.out);
  };
  EXPECT_THAT(offered("lockstep ru"), Contains("line: lockstep run "));
  EXPECT_THAT(offered("lockstep "),
              IsSupersetOf({"run", "bench", "inspect", "completion"}));
  EXPECT_THAT(offered("lockstep inspect "), Contains("flight"));
  EXPECT_THAT(offered("lockstep run --nnodes=2 -m --numa-b"),
              Contains("line: lockstep run --nnodes=2 -m --numa-binding "));
  EXPECT_THAT(offered("lockstep run --nnodes train --no-"),
              Contains("line: lockstep run --nnodes train --no-python "));
  // The program's words are not completed.
  EXPECT_THAT(offered("lockstep run --nnodes 2 train --no-"),
              Contains("line: lockstep run --nnodes 2 train --no-"));
  // `lockstep bench` is a program of its own, whose help is asked.
  EXPECT_THAT(offered("lockstep bench --"), Contains("--sizes"));
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
      {{"run", "--nnodes=2", "--rdzv-endpoint=localhost:7,127.0.0.1:7", touch,
        proof},
       2,
       "names 127.0.0.1:7 twice"},
      // White space between endpoints is not a part of them.
      {{"run", "--nnodes=2", "--rdzv-endpoint=localhost:7, localhost:7", touch,
        proof},
       2,
       "names localhost:7 twice"},
      {{"run", "--nnodes=2", "--standalone", touch, proof}, 2, "--standalone"},
      {{"run", "--nnodes=2", "--node-rank=2", "--master-addr=::1", touch,
        proof},
       2,
       "from 0 to 1"},
      {{"run", "--nnodes=2", touch, proof}, 2, "--rdzv-endpoint=HOST"},
      {{"run", "--nnodes=2", "--rdzv-backend=c10d", touch, proof},
       2,
       "--rdzv-endpoint=HOST"},
      {{"run", "--nnodes=2", "--master-addr=::1", touch, proof},
       2,
       "set LOCKSTEP_JOB_SECRET",
       {"LOCKSTEP_JOB_SECRET="}},
      {{"run", "--nnodes=2", "--master-addr=::1", touch, proof},
       2,
       "from 16 to 1024",
       {"LOCKSTEP_JOB_SECRET=short"}},
      {{"run", "--nnodes=2", "--master-addr=::1", "--rdzv-insecure", touch,
        proof},
       2,
       "leave one of them out",
       {"LOCKSTEP_JOB_SECRET=a secret of the test"}},
      {{"run", "--nnodes=2", "--master-addr=::1",
        "--rdzv-secret-file=/no/such/file", touch, proof},
       2,
       "/no/such/file"},
      {{"run", "--nnodes=2", "--master-addr=::1", "--rdzv-backend=c10d",
        "--rdzv-insecure", touch, proof},
       2,
       "knows no secret"},
      {{"run", "--nnodes=2", "--rdzv-endpoint=[::1", touch, proof},
       2,
       "in brackets"},
      {{"run", "--nnodes=2", "--rdzv-endpoint=a:b", touch, proof},
       2,
       "port of --rdzv-endpoint is \"b\""},
      {{"run", "--nnodes=2", "--rdzv-endpoint=:29400", touch, proof},
       2,
       "allowed is HOST"},
      {{"run", "--nnodes=2", "--master-addr=::1", "--master-port=0", touch,
        proof},
       2,
       "port 0"},
      {{"run", "--rdzv-conf=last_call=3", touch, proof}, 2, "join_timeout"},
      {{"run", "--rdzv-conf=is_host=5", touch, proof}, 2, "true and false"},
      {{"run", "--nnodes=4:1", touch, proof}, 2, "is \"4:1\"; allowed"},
      {{"run", "--nnodes=1:4", touch, proof}, 2, "--rdzv-endpoint=HOST"},
      {{"run", "--nnodes=1:4", "--rdzv-backend=static", touch, proof},
       2,
       "fixed ranks"},
      {{"run", "--leave-out-after=3:x", touch, proof},
       2,
       "--leave-out-after is \"x\""},
      {{"run", "--leave-out-after=x", touch, proof},
       2,
       "the form is FAILURES[:WITHIN[:FOR]]"},
      {{"run", "--scale-up-wait=-1", touch, proof}, 2, "--scale-up-wait"},
      {{"run", "--node-rank=1", touch, proof}, 2, "can only be 0"},
      {{"run", "--rdzv-backend=x", touch, proof}, 2, "static and c10d"},
      {{"run", "--rdzv-backend=etcd", touch, proof}, 2, "no etcd server"},
      {{"run", "--rdzv-backend=etcd-v2", touch, proof}, 2, "no etcd server"},
      {{"run", "--rdzv-conf=store_type=file", touch, proof}, 2, "is tcp"},
      {{"run", "--rdzv-conf=read_timeout=x", touch, proof}, 2, "read_timeout"},
      {{"run", "--start-method=thread", touch, proof}, 2, "forkserver"},
      {{"run", "--event-log-handler=console", touch, proof}, 2, "no event log"},
      {{"run", "--event-log-handler=dynamic_rendezvous", touch, proof},
       2,
       "no event log"},
      {{"run", "--logs-specs=mine", touch, proof}, 2, "plugin of Python"},
      {{"run", "--signals-to-handle=SIGKILL", touch, proof}, 2, "SIGKILL"},
      {{"run", "--signals-to-handle=TERM", touch, proof}, 2, "SIGTERM,"},
      {{"run", "--omp-threads=0", touch, proof}, 2, "--omp-threads is \"0\""},
      {{"run", "--duplicate-stdout-filters=a,", touch, proof}, 2, "is empty"},
      {{"run", "--nproc-per-node=2", "--virtual-local-rank", touch, proof},
       2,
       "which is \"3\" and names 1, and there are 2",
       {"CUDA_VISIBLE_DEVICES=3"}},
      {{"run", "--max-restarts=x", touch, proof}, 2, "--max-restarts"},
      {{"run", "--shutdown-timeout=-3", touch, proof}, 2, "from 0 to 86400"},
      {{"run", "--heal", touch, proof}, 2, "give --max-restarts"},
      {{"run", "--heal", "--max-restarts=1", touch, proof},
       2,
       "give --standby"},
      {{"run", "--heal", "--standby=1", "--max-restarts=1", touch, proof},
       2,
       "--standby is for C++ programs"},
      {{"run", "--hang-timeout=0.5", touch, proof}, 2, "from 1 to 86400"},
      {{"run", "--hang-timeout=-1", touch, proof}, 2, "from 1 to 86400"},
      {{"run", "--rdzv-id=" + std::string(201, 'x'), touch, proof},
       2,
       "--rdzv-id has 201 characters"},
      {{"run", "--hang-timeout=never", touch, proof}, 2, "--hang-timeout is"},
      {{"run", "--report=/no/folder/x", touch, proof}, 2, "--report is \"/no/"},
      {{"run", "--report=/", touch, proof}, 2, "in a folder that exists"},
      {{"run", "--master-port=70000", touch, proof}, 2, "65535"},
      {{"run", "--tee=7", touch, proof}, 2, "--tee is \"7\""},
      {{"run", "--log-dir=/proc/nothing", touch, proof}, 2, "/proc/nothing"},
      {{"run", "--local-ranks-filter=a", touch, proof}, 2, "is \"a\""},
      {{"run", "--numa_binding=near", touch, proof}, 2, "core-complex"},
      {{"run", touch, proof}, 2, "is \"x\"", {"PET_NUMA_BINDING=x"}},
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
  const fs::path unnamed = write_program("train", read_file(script), false);
  EXPECT_EQ(run({"--run-path", "--no-python", unnamed, "1"}).out,
            "0 ['1'] True\n");
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

// As the TCPStore of a C++ rank 0 does.
TEST_F(CommandLine, GivenPortIsFreeAgainAfterRankZeroHasListened) {
  const auto probe = run_script({}, "echo $MASTER_PORT");
  const std::string port = lines(probe.out).front();
  const auto result = run_script(
      {"--master-port=" + port, "--max-restarts=2"},
      "python3 -c 'import os, socket; socket.socket(fileno=int(os.environ["
      "\"LOCKSTEP_MASTER_LISTEN_FD\"])).listen()' && echo $MASTER_PORT; "
      "exit 1");
  EXPECT_EQ(result.out, port + "\n" + port + "\n" + port + "\n") << result.err;
}

}  // namespace
}  // namespace lockstep::internal::testing

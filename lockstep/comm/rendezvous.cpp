#include "lockstep/comm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/comm/launcher_store.h"
#include "lockstep/comm/store_socket.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kMaxRank = 1 << 24;

std::chrono::milliseconds allowed(const InitProcessGroupOptions& options) {
  return options.timeout.value_or(kDefaultTimeout);
}

struct Endpoint {
  std::string host;
  uint16_t port;
};

struct Place {
  int rank;
  int world_size;
};

Place checked_place(int64_t rank, int64_t world_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw std::invalid_argument(
        "rank " + std::to_string(rank) + " in a world of " +
        std::to_string(world_size) +
        ": the world size must be at least 1, and the rank from 0 to the "
        "world size - 1");
  }
  return {static_cast<int>(rank), static_cast<int>(world_size)};
}

Rendezvous without_check_in(const c10::intrusive_ptr<c10d::Store>& store,
                            Place place) {
  return {.store = store,
          .rank = place.rank,
          .world_size = place.world_size,
          .group_store = store};
}

// Whether the launcher hosts the store at `endpoint`. It does so only at its
// own address; at any other one the program's rank 0 hosts the store.
bool launcher_hosts(const Endpoint& endpoint) {
  return get_env("TORCHELASTIC_USE_AGENT_STORE") == "True" &&
         get_env("MASTER_ADDR") == endpoint.host &&
         get_env("MASTER_PORT") == std::to_string(endpoint.port);
}

// Called by a rank that may not join. The rank that hosts the store counts
// ranks until its world is complete. So this writes the reason and completes
// the count, and then that rank finds the reason.
void release_host(c10d::TCPStore& store, const CheckIn& check_in,
                  const std::string& reason) {
  try {
    check_in.refusal().say(reason);
    int size = check_in.agreed_world_size();
    for (int counted = 0; counted < size; ++counted) {
      store.waitForWorkers();  // only counts: it is not the host
    }
  } catch (const c10::DistError&) {
    // The rank that hosts the store has gone already.
  }
}

// `opened`, if given, is told the port once rank 0 listens (port 0: any).
Rendezvous join_tcp(const Endpoint& endpoint, Place place,
                    std::chrono::milliseconds timeout,
                    const std::function<void(uint16_t)>& opened = {}) {
  auto where = endpoint.host + ":" + std::to_string(endpoint.port);
  Deadline deadline = Deadline::after(timeout);
  bool agent_store = launcher_hosts(endpoint);
  c10d::TCPStoreOptions options;
  options.port = endpoint.port;
  options.isServer = place.rank == 0 && !agent_store;
  options.numWorkers = place.world_size;
  options.waitWorkers = false;  // check in first, to name absent ranks
  options.timeout = timeout;
  if (options.isServer) {
    if (auto socket = store_socket(endpoint.host, endpoint.port)) {
      options.masterListenFd = socket->release();
    }
  }
  auto prefix = CheckIn::round_prefix(agent_store);
  c10::intrusive_ptr<c10d::TCPStore> store;
  auto connect = [&] {
    if (!options.isServer) {
      if (auto why = await_listener(endpoint.host, endpoint.port, deadline)) {
        throw c10::DistNetworkError(
            *why + (agent_store
                        ? "; the launcher hosts it"
                        : "; rank 0 hosts it: check whether rank 0 runs, "
                          "and at that address"));
      }
      options.timeout =
          std::max(deadline.remaining(), std::chrono::milliseconds(1));
    }
    store = c10::make_intrusive<c10d::TCPStore>(endpoint.host, options);
    return CheckIn(store, prefix, place.rank, place.world_size);
  };
  std::optional<CheckIn> check_in;
  try {
    check_in = connect();
    if (opened) opened(store->getPort());
    if (options.isServer) {
      check_in->mark_host();
    } else if (!agent_store) {
      while (!check_in->is_new_host(deadline) && !deadline.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        check_in = connect();
      }
    }
  } catch (const c10::DistError& error) {
    throw c10::DistNetworkError(
        c10::str("rank ", place.rank, " of ", place.world_size,
                 options.isServer ? " could not open the store at "
                                  : " could not reach the store at ",
                 where, " after ", deadline.elapsed().count(), " ms (allowed ",
                 timeout.count(), " ms): ", error.what_without_backtrace()));
  }
  Rendezvous joined{.store = store,
                    .rank = place.rank,
                    .world_size = place.world_size,
                    .check_in = check_in,
                    .group_store = store,
                    .hosted_by_rank_zero = !agent_store};
  try {
    check_in->announce();
  } catch (const std::invalid_argument& refusal) {
    if (options.isServer) {  // the others that have come must be told
      joined.refusal = refusal.what();
      return joined;
    }
    if (!agent_store) release_host(*store, *check_in, refusal.what());
    throw;
  }
  try {
    store->setTimeout(
        std::max(deadline.remaining(), std::chrono::milliseconds(1)));
    // Python's rank 0 counts the ranks in the same way before it goes on. Only
    // the rank that hosts the store waits; the others learn which ranks are
    // absent when they connect.
    if (options.isServer) check_in->await_briefly();
    store->waitForWorkers();
  } catch (const c10::DistError&) {
    const auto absent = joined.absent_ranks();
    // The others ask for the absent ranks, too, so keep the store for them.
    joined.part(nullptr, Deadline::after(std::chrono::seconds(5)));
    throw c10::DistStoreError(
        c10::str("init_process_group: rank ", place.rank, " waited ",
                 deadline.elapsed().count(), " ms (allowed ", timeout.count(),
                 " ms) at ", where, " for a world of ", place.world_size,
                 "; absent: rank ", absent));
  }
  store->setTimeout(timeout);
  if (options.isServer) {
    // A client connection, as the other ranks have: a group that an exception
    // left alive must not keep the store's address taken.
    joined.group_store = store->clone();
    joined.group_store->setTimeout(timeout);
    if (auto refusal = check_in->refusal().heard()) {
      joined.refusal = "init_process_group: rank 0 of " +
                       std::to_string(place.world_size) +
                       " gives up, because " + *refusal;
    }
  } else if (agent_store) {
    if (auto groups = check_in->groups_prefix(); !groups.empty()) {
      joined.group_store =
          c10::make_intrusive<c10d::PrefixStore>(groups, store);
    }
  }
  return joined;
}

// Returns the socket of the store that the launcher keeps for the world that
// meets at `port`. A program may have set another MASTER_PORT, for a world of
// its own.
std::optional<std::string> launcher_store_for(int64_t port) {
  auto name = get_env("LOCKSTEP_STORE");
  if (name && !name->ends_with("/" + std::to_string(port))) name.reset();
  return name;
}

bool meets_at_launcher(bool python_may_join) {
  const auto choice = get_env("LOCKSTEP_WORKER_STORE").value_or("auto");
  if (choice == "auto") return !python_may_join;
  if (choice == "agent") return true;
  if (choice == "tcp") return false;
  throw std::invalid_argument("LOCKSTEP_WORKER_STORE is \"" + choice +
                              "\"; allowed are auto, agent and tcp");
}

// The name of this process for the places that it claims: what a message may
// show of it, and a random part after '#', since containers may share host name
// and process id.
std::string process_name() {
  static const std::string random = std::to_string(std::random_device()());
  return "pid " + std::to_string(::getpid()) + " on " + host_name() + "#" +
         random;
}

// Joins at the store that the launcher keeps, or, if `at_launcher` is false,
// only says there that this rank meets the others at rank 0's store: then the
// result has a refusal if others do not.
//
// The store lives as long as the attempt, in which a program may join again, or
// several programs one after the other. So each join has keys of its own, under
// a number that counts the joins of each rank. Ranks join equally often, and so
// agree on that number.
Rendezvous join_launcher(const std::string& socket, Place place,
                         std::chrono::milliseconds timeout, bool at_launcher) {
  const auto store = c10::make_intrusive<LauncherStore>(socket, timeout);
  const auto restart =
      "lockstep/" + get_env("TORCHELASTIC_RESTART_COUNT").value_or("0");
  const auto rank = "rank " + std::to_string(place.rank);
  const auto claimed = store->claim(
      restart + "/place/" + std::to_string(place.rank), process_name());
  const auto prefix = restart + "." + std::to_string(claimed.count);
  Rendezvous joined{
      .store = store,
      .rank = place.rank,
      .world_size = place.world_size,
      .check_in = CheckIn(store, prefix, place.rank, place.world_size),
      .group_store = store,
      .kept_by_launcher = true};
  const std::string here =
      at_launcher ? "the launcher's store" : "rank 0's TCPStore";
  const auto first = store->compareSet(prefix + "/meets", "", here);
  if (first != here) {
    joined.refusal = rank + " meets the others at " + here +
                     ", and another rank of the job at " + first +
                     "; give all ranks the same backend and the same "
                     "--worker-store (LOCKSTEP_WORKER_STORE)";
  } else if (at_launcher && claimed.taken_by) {
    joined.refusal = "two processes of this job call themselves " + rank +
                     " of " + std::to_string(place.world_size) + ": pid " +
                     std::to_string(::getpid()) + ", and " +
                     claimed.taken_by->substr(0, claimed.taken_by->find('#')) +
                     "; give each its own RANK";
  } else if (at_launcher) {
    try {
      joined.check_in->announce();
    } catch (const std::invalid_argument& refusal) {
      joined.refusal = refusal.what();
    }
  }
  if (!at_launcher && !joined.refusal) return joined;
  if (auto groups = joined.check_in->groups_prefix(); !groups.empty()) {
    joined.group_store = c10::make_intrusive<c10d::PrefixStore>(groups, store);
  }
  return joined;
}

// Joins by the variables of a launcher.
Rendezvous join_by_launcher(const Endpoint& endpoint, Place place,
                            std::chrono::milliseconds timeout,
                            bool python_may_join) {
  const auto socket = launcher_store_for(endpoint.port);
  if (!socket) return join_tcp(endpoint, place, timeout);
  if (meets_at_launcher(python_may_join)) {
    return join_launcher(*socket, place, timeout, /*at_launcher=*/true);
  }
  c10::intrusive_ptr<c10d::Store> said;
  try {
    auto known = join_launcher(*socket, place, timeout, /*at_launcher=*/false);
    if (known.refusal) return known;
    said = std::move(known.store);
  } catch (const c10::DistError&) {
    // This process cannot reach the launcher, and does not need to.
  }
  auto joined = join_tcp(endpoint, place, timeout);
  joined.launcher_store = std::move(said);
  return joined;
}

// Throws if a scheduler's own variables say that there are several tasks, but
// not which one this process is, as in Slurm's batch script: going on alone
// would be silently wrong.
void refuse_unknown_task() {
  for (const char* name :
       {"SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    auto size = get_env_int(name, 0, kMaxRank);
    if (size && *size > 1) {
      throw std::invalid_argument(
          std::string(name) + " is " + std::to_string(*size) +
          ", but this process is not a task that srun or mpirun started, and "
          "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set; start "
          "the program with srun, mpirun or `lockstep run`, or export them for "
          "each task");
    }
  }
}

Rendezvous join_by_environment(const InitProcessGroupOptions& options,
                               bool python_may_join) {
  constexpr std::array kNames{"RANK", "WORLD_SIZE", "MASTER_ADDR",
                              "MASTER_PORT"};
  std::string missing;
  size_t missing_count = 0;
  for (const char* name : kNames) {
    if (get_rank_env(name)) continue;
    if ((name == kNames[0] && options.rank >= 0) ||
        (name == kNames[1] && options.world_size >= 0)) {
      continue;
    }
    ++missing_count;
    missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  if (missing_count == kNames.size()) {
    refuse_unknown_task();
    return without_check_in(c10::make_intrusive<c10d::HashStore>(), {0, 1});
  }
  if (const auto scheduler = scheduler_of_ranks();
      scheduler && missing_count > 0) {
    throw std::invalid_argument(
        *scheduler + " started this process, and does not say: " + missing +
        ". Set it for all tasks, MASTER_ADDR to the host of rank 0 (mpirun -x "
        "MASTER_ADDR=HOST)");
  }
  if (missing_count > 0) {
    throw std::invalid_argument(
        "env:// needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; not "
        "set: " +
        missing +
        ". Set them all, or none to run alone, or start with `lockstep run`");
  }
  int64_t world_size = options.world_size;
  if (world_size < 0) world_size = *get_rank_env_int("WORLD_SIZE", 1, kMaxRank);
  int64_t rank = options.rank;
  if (rank < 0) rank = *get_rank_env_int("RANK", 0, kMaxRank);
  auto port = *get_rank_env_int("MASTER_PORT", 0, 65535);
  return join_by_launcher(
      {*get_rank_env("MASTER_ADDR"), static_cast<uint16_t>(port)},
      checked_place(rank, world_size), allowed(options), python_may_join);
}

// "tcp://host:port" or "tcp://[v6]:port", with "?rank=R&world_size=N".
Rendezvous join_by_tcp_url(const InitProcessGroupOptions& options) {
  const std::string& url = options.init_method;
  auto bad = [&](const std::string& why) {
    return std::invalid_argument(
        "init_method \"" + url + "\": " + why +
        "; give tcp://host:port, with rank and world_size in the options or "
        "as ?rank=R&world_size=N");
  };
  auto rest = url.substr(std::string("tcp://").size());
  int64_t rank = options.rank;
  int64_t world_size = options.world_size;
  if (auto question = rest.find('?'); question != rest.npos) {
    std::string query = rest.substr(question + 1) + "&";
    rest.resize(question);
    for (size_t at = 0; at < query.size();) {
      auto end = query.find('&', at);
      auto part = query.substr(at, end - at);
      at = end + 1;
      if (part.starts_with("rank=")) {
        rank = parse_int("rank in " + url, part.substr(5), 0, kMaxRank);
      } else if (part.starts_with("world_size=")) {
        world_size =
            parse_int("world_size in " + url, part.substr(11), 1, kMaxRank);
      } else if (!part.empty()) {
        throw bad("unknown parameter \"" + part + "\"");
      }
    }
  }
  auto colon = rest.rfind(':');
  if (colon == rest.npos || colon == 0) throw bad("host or port is missing");
  auto host = rest.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  auto port = parse_int("port in " + url, rest.substr(colon + 1), 0, 65535);
  if (rank < 0) throw bad("rank is missing");
  if (world_size < 0) throw bad("world_size is missing");
  return join_tcp({host, static_cast<uint16_t>(port)},
                  checked_place(rank, world_size), allowed(options));
}

// Returns why the file cannot be used, or nothing if it can. A run that was
// killed leaves its file, whose keys would lead the next run to processes that
// are gone. LibTorch removes the file after a run that ends well.
std::optional<std::string> refuse_used_file(c10d::FileStore& store,
                                            const std::string& path,
                                            Place place) {
  const auto rank = "rank " + std::to_string(place.rank);
  if (store.add("lockstep/" + rank, 1) == 1) return std::nullopt;
  return "init_method \"file://" + path + "\": " + rank +
         " has joined with this file before. Either the file is left from an "
         "earlier run: remove it, or give each run a file of its own; or two "
         "processes call themselves " +
         rank + ": start each rank once";
}

Rendezvous join_by_file(const InitProcessGroupOptions& options) {
  auto path = options.init_method.substr(std::string("file://").size());
  if (path.empty() || path.front() != '/') {
    throw std::invalid_argument("init_method \"" + options.init_method +
                                "\": give file:// and an absolute path, for "
                                "example file:///tmp/job-rendezvous");
  }
  // LibTorch would try until the timeout is over.
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  if (is_folder || !std::filesystem::is_directory(folder, ignored)) {
    throw std::invalid_argument(
        "init_method \"" + options.init_method + "\": " +
        (is_folder ? path + " is a folder; name a file in it"
                   : "the folder " + folder.string() +
                         " does not exist; name a file in a folder that all "
                         "ranks see"));
  }
  auto place = checked_place(options.rank, options.world_size);
  auto store = c10::make_intrusive<c10d::FileStore>(path, place.world_size);
  store->setTimeout(allowed(options));
  auto joined = without_check_in(store, place);
  joined.refusal = refuse_used_file(*store, path, place);
  return joined;
}

}  // namespace

std::string Rendezvous::absent_ranks() const {
  return check_in ? check_in->absent_ranks() : "";
}

void Rendezvous::remember_host() const {
  if (!hosted_by_rank_zero || rank == 0 || !check_in) return;
  try {
    check_in->remember_host();
  } catch (const c10::Error&) {
    // The store is gone, so it cannot be mistaken for the next one.
  }
}

bool Rendezvous::part(LifeSigns* life_signs, const Deadline& deadline) const {
  const bool waits =
      hosted_by_rank_zero || (kept_by_launcher && life_signs != nullptr);
  if (!waits || world_size == 1) return true;
  return check_in->part(life_signs, deadline);
}

Rendezvous rendezvous(const LaunchedWorld& world,
                      const InitProcessGroupOptions& options) {
  const auto place = checked_place(world.rank, world.size);
  if (world.size == 1) {
    return without_check_in(c10::make_intrusive<c10d::HashStore>(), place);
  }
  if (world.rank != 0) {
    const auto where = world.from_rank_zero({});
    const auto space = where.find(' ');
    const auto port = parse_int("the port of rank 0's store",
                                where.substr(space + 1), 1, 65535);
    return join_tcp({where.substr(0, space), static_cast<uint16_t>(port)},
                    place, allowed(options));
  }
  const auto host =
      get_env("MASTER_ADDR")
          .value_or(world.one_host ? "127.0.0.1" : outward_address());
  const auto port = get_env_int("MASTER_PORT", 0, 65535).value_or(0);
  return join_tcp({host, static_cast<uint16_t>(port)}, place, allowed(options),
                  [&](uint16_t opened) {
                    world.from_rank_zero(host + " " + std::to_string(opened));
                  });
}

Rendezvous rendezvous(const InitProcessGroupOptions& options,
                      bool python_may_join) {
  if (allowed(options) <= std::chrono::milliseconds(0)) {
    throw std::invalid_argument("timeout is " +
                                std::to_string(allowed(options).count()) +
                                " ms; it must be more than 0");
  }
  if (options.store) {
    if (!options.init_method.empty()) {
      throw std::invalid_argument(
          "give an init_method or a store, not both (init_method is \"" +
          options.init_method + "\")");
    }
    auto place = checked_place(options.rank, options.world_size);
    return without_check_in(options.store, place);
  }
  const std::string& method = options.init_method;
  if (method.empty() || method == "env://") {
    return join_by_environment(options, python_may_join);
  }
  if (method.starts_with("tcp://")) return join_by_tcp_url(options);
  if (method.starts_with("file://")) return join_by_file(options);
  throw std::invalid_argument("init_method \"" + method +
                              "\" is unknown; allowed are env://, "
                              "tcp://host:port and file:///path");
}

Rendezvous imagined_rendezvous(const std::string& backend,
                               const InitProcessGroupOptions& options) {
  if (options.store ||
      !(options.init_method.empty() || options.init_method == "env://")) {
    throw std::invalid_argument(
        "backend \"" + backend + "\" meets no other process, but " +
        (options.store ? "a store"
                       : "init_method \"" + options.init_method + "\"") +
        " was given; give only rank and world_size");
  }
  return rendezvous_apart(options);
}

Rendezvous rendezvous_apart(const InitProcessGroupOptions& options) {
  int64_t world_size = options.world_size;
  if (world_size < 0) {
    world_size = get_env_int("WORLD_SIZE", 1, kMaxRank).value_or(1);
  }
  int64_t rank = options.rank;
  if (rank < 0) rank = get_env_int("RANK", 0, kMaxRank).value_or(0);
  return without_check_in(c10::make_intrusive<c10d::HashStore>(),
                          checked_place(rank, world_size));
}

c10::intrusive_ptr<c10d::Store> launcher_store(
    std::chrono::milliseconds timeout) {
  const auto socket =
      launcher_store_for(get_rank_env_int("MASTER_PORT", 0, 65535).value_or(0));
  if (!socket) {
    throw std::invalid_argument(
        "LOCKSTEP_STORE names no store of a launcher for this world; start the "
        "program with `lockstep run`");
  }
  return c10::make_intrusive<LauncherStore>(*socket, timeout);
}

}  // namespace lockstep::internal

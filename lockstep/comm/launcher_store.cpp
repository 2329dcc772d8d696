#include "lockstep/comm/launcher_store.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <system_error>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/watched_store.h"

namespace lockstep::internal {
namespace {

using Request = WorkerCall::Operation;
using std::chrono::milliseconds;

std::string bytes_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::vector<uint8_t> octets(const std::string& text) {
  return {text.begin(), text.end()};
}

Deadline deadline_of(const milliseconds& timeout) {
  return Deadline::after(timeout == c10d::Store::kNoTimeout
                             ? milliseconds::max()
                             : bounded_timeout(timeout));
}

[[noreturn]] void fail_late(const std::vector<std::string>& keys,
                            const milliseconds& timeout) {
  throw c10::DistStoreError(
      c10::str("wait timeout after ", timeout.count(), " ms, keys: ", keys));
}

template <typename Call>
auto guarded(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const WorkerStoreLost& error) {
    throw c10::DistNetworkError(error.what());
  } catch (const std::invalid_argument& error) {
    throw StoreRefusal(error.what());
  } catch (const std::system_error& error) {
    throw c10::DistNetworkError(error.what());
  }
}

}  // namespace

LauncherStore::LauncherStore(const std::string& name,
                             const milliseconds& timeout)
    : Store(timeout), link_(guarded([&] {
        return std::make_shared<WorkerStoreLink>(name, deadline_of(timeout));
      })) {}

LauncherStore::LauncherStore(std::shared_ptr<WorkerStoreLink> link,
                             const milliseconds& timeout)
    : Store(timeout), link_(std::move(link)) {}

c10::intrusive_ptr<c10d::Store> LauncherStore::clone() {
  return c10::intrusive_ptr<LauncherStore>::unsafe_steal_from_new(
      std::unique_ptr<LauncherStore>(new LauncherStore(link_, timeout_))
          .release());
}

WorkerReply LauncherStore::ask(const WorkerCall& call) {
  auto reply =
      guarded([&] { return link_->call(call, deadline_of(timeout_)); });
  if (reply.kind == WorkerReply::Kind::refused &&
      call.operation != Request::claim) {
    throw StoreRefusal(reply.text + " (key " + call.key + ")");
  }
  return reply;
}

LauncherStore::Place LauncherStore::claim(const std::string& key,
                                          const std::string& name) {
  auto reply = ask({.operation = Request::claim, .key = key, .value = name});
  Place place{.count = reply.number};
  if (reply.kind == WorkerReply::Kind::refused) {
    place.taken_by = std::move(reply.text);
  }
  return place;
}

void LauncherStore::set(const std::string& key,
                        const std::vector<uint8_t>& value) {
  ask({.operation = Request::set, .key = key, .value = bytes_text(value)});
}

std::vector<uint8_t> LauncherStore::compareSet(
    const std::string& key, const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return octets(ask({.operation = Request::compare_set,
                     .key = key,
                     .value = bytes_text(desired),
                     .expected = bytes_text(expected)})
                    .text);
}

std::vector<uint8_t> LauncherStore::get(const std::string& key) {
  const auto deadline = deadline_of(timeout_);
  while (true) {
    auto reply = ask({.operation = Request::get, .key = key});
    if (reply.kind == WorkerReply::Kind::value) return octets(reply.text);
    // The key may be deleted again before it is read.
    if (!guarded([&] { return link_->wait({key}, deadline); })) {
      fail_late({key}, timeout_);
    }
  }
}

int64_t LauncherStore::add(const std::string& key, int64_t value) {
  return ask({.operation = Request::add, .key = key, .number = value}).number;
}

bool LauncherStore::deleteKey(const std::string& key) {
  return ask({.operation = Request::remove, .key = key}).number > 0;
}

bool LauncherStore::check(const std::vector<std::string>& keys) {
  return guarded([&] { return link_->check(keys, deadline_of(timeout_)); });
}

int64_t LauncherStore::getNumKeys() {
  return ask({.operation = Request::count_keys}).number;
}

void LauncherStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void LauncherStore::wait(const std::vector<std::string>& keys,
                         const milliseconds& timeout) {
  if (guarded([&] { return link_->wait(keys, deadline_of(timeout)); })) return;
  fail_late(keys, timeout);
}

void LauncherStore::append(const std::string& key,
                           const std::vector<uint8_t>& value) {
  ask({.operation = Request::append, .key = key, .value = bytes_text(value)});
}

std::vector<std::vector<uint8_t>> LauncherStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  std::vector<std::vector<uint8_t>> values;
  values.reserve(keys.size());
  for (const auto& key : keys) values.push_back(get(key));
  return values;
}

void LauncherStore::multiSet(const std::vector<std::string>& keys,
                             const std::vector<std::vector<uint8_t>>& values) {
  if (keys.size() != values.size()) {
    throw c10::DistStoreError(c10::str("multiSet got ", keys.size(),
                                       " keys and ", values.size(), " values"));
  }
  for (size_t at = 0; at < keys.size(); ++at) set(keys[at], values[at]);
}

}  // namespace lockstep::internal

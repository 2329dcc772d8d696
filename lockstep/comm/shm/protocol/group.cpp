#include "lockstep/comm/shm/protocol/group.h"

#include <utility>

#include "lockstep/comm/shm/protocol/collective.h"
#include "lockstep/comm/shm/protocol/message_engine.h"

namespace lockstep::internal::shm {

Group::Group(const Membership& membership)
    : core_(std::make_unique<Core>(membership)) {}

Group::~Group() { leave(); }

void Group::leave() {
  hung_up_ = true;
  core_->messages.end_all("this rank has destroyed the group");
  core_->waiting.leave();
  core_->links->hang_up();
}

int Group::rank() const { return core_->rank; }
int Group::size() const { return core_->size; }

void Group::barrier(milliseconds timeout) {
  Collective call(*core_,
                  {.operation = CollectiveKind::barrier,
                   .dtype = DType::uint8,
                   .agreed = 0},
                  timeout);
  call.announce(0);
  call.wait_for_all();
}

std::shared_ptr<Message> Group::start_send(int to, int32_t tag, ConstBytes data,
                                           DType dtype) {
  core_->registered.look_if_told();
  return core_->messages.start_send(to, tag, data, dtype);
}

std::shared_ptr<Message> Group::start_receive(int from, int32_t tag, Bytes data,
                                              DType dtype) {
  core_->registered.look_if_told();
  return core_->messages.start_receive(from, tag, data, dtype);
}

void Group::wait(Message& message, milliseconds timeout) {
  core_->messages.wait(message, timeout);
}

bool Group::has_ended(Message& message) {
  return core_->messages.has_ended(message);
}

void Group::give_up(Message& message, const std::string& why) {
  core_->messages.give_up(message, why);
}

void Group::throw_if_failed(const Message& message) {
  MessageEngine::throw_if_failed(message);
}

int Group::source(const Message& message) {
  return MessageEngine::source(message);
}

void Group::serve_messages(std::stop_token stop) {
  core_->messages.serve(std::move(stop));
}

void* Group::allocate_registered(size_t bytes) {
  return core_->registered.allocate(bytes);
}

void Group::free_registered(void* data) { core_->registered.free(data); }

std::string Group::departures() const {
  std::string all;
  // After this rank has hung up, its own sockets look like those of peers that
  // hung up.
  if (hung_up_) return all;
  for (const auto& one : core_->waiting.departures()) {
    if (one.well || all.find(one.words) != all.npos) continue;
    // A peer may pass on what it has heard of several ranks.
    if (one.words.find(all) != one.words.npos) all.clear();
    all += (all.empty() ? "" : "; ") + one.words;
  }
  return all;
}

void Group::hang_up(const std::string& reason) {
  hang_up(reason, RankState::kFailed);
}

void Group::pass_on(const std::string& cause) {
  hang_up(cause, RankState::kTold);
}

void Group::keep_cause(const std::string& cause) {
  core_->waiting.keep_cause(cause);
}

void Group::hang_up(const std::string& reason, uint32_t how) {
  hung_up_ = true;
  core_->waiting.break_down(reason, how);
  core_->messages.end_all(reason);
  core_->links->hang_up();
}

}  // namespace lockstep::internal::shm

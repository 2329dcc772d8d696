#include "lockstep/parallel/healing/buddy_copies.h"

#include <ATen/Functions.h>

#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/point_to_point.h"

namespace lockstep::internal {
namespace {

// A message before the records: whether they are all that the rank has, how
// many there are, and the steps and bytes of each.
constexpr int64_t kHead = 2;

int ranks_of_host() {
  return static_cast<int>(
      get_env_int("LOCAL_WORLD_SIZE", 1, 1 << 30).value_or(1));
}

int buddy_of(int rank) { return (rank + ranks_of_host()) % get_world_size(); }

// Returns the rank whose buddy this one is.
int ward_of(int rank) {
  return (rank + get_world_size() - ranks_of_host()) % get_world_size();
}

at::Tensor head_for(size_t slots) {
  return at::zeros({kHead + 2 * static_cast<int64_t>(slots)}, at::kLong);
}

// The tensors of one rank's records. They share the memory of the records that
// are sent.
struct Message {
  Message(const std::vector<PlaceRecord::Record>& records, size_t slots,
          bool all)
      : head(head_for(slots)) {
    auto* at = head.mutable_data_ptr<int64_t>();
    *at++ = all ? 1 : 0;
    *at++ = static_cast<int64_t>(records.size());
    for (const auto& [number, steps, bytes] : records) {
      *at++ = steps;
      *at++ = static_cast<int64_t>(bytes.size());
      tensors.push_back(at::from_blob(const_cast<std::byte*>(bytes.data()),
                                      {static_cast<int64_t>(bytes.size())},
                                      at::kByte));
    }
  }
  explicit Message(at::Tensor received) : head(std::move(received)) {
    for (int64_t i = 0; i < numbers()[1]; ++i) {
      tensors.push_back(at::empty({numbers()[kHead + 2 * i + 1]}, at::kByte));
    }
  }
  const int64_t* numbers() const { return head.const_data_ptr<int64_t>(); }

  void write_to(PlaceRecord& record) const {
    if (numbers()[0] != 0) record.forget_all();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const PlaceRecord::Bytes bytes(
          static_cast<const std::byte*>(tensors[i].const_data_ptr()),
          tensors[i].nbytes());
      record.write(numbers()[kHead + 2 * i], {&bytes, 1});
    }
  }

  at::Tensor head;
  std::vector<at::Tensor> tensors{};
};

void wait_for(const std::vector<WorkPtr>& works) {
  for (const WorkPtr& work : works) work->wait();
}

}  // namespace

BuddyCopies::BuddyCopies(PlaceRecord& own, const FileDescriptor& memory,
                         size_t first)
    : own_(own), copies_(memory, first, own.slots()) {}

void BuddyCopies::exchange() {
  const int buddy = buddy_of(get_rank());
  const int ward = ward_of(get_rank());
  const auto records = own_.written_after(sent_.value_or(0));
  const Message sent(records, own_.slots(), !sent_);
  auto head = head_for(own_.slots());
  wait_for({isend(sent.head, buddy), irecv(head, ward)});
  const Message got(head);
  std::vector<WorkPtr> works;
  for (const auto& tensor : sent.tensors) works.push_back(isend(tensor, buddy));
  for (const auto& tensor : got.tensors) works.push_back(irecv(tensor, ward));
  wait_for(works);
  got.write_to(copies_);
  if (!records.empty()) sent_ = records.back().number;
}

void BuddyCopies::give_back(const std::vector<int>& lost) {
  for (const int rank : lost) {
    const int buddy = buddy_of(rank);
    if (get_rank() == buddy) {
      const Message copies(copies_.written_after(0), own_.slots(), true);
      send(copies.head, rank);
      for (const auto& tensor : copies.tensors) send(tensor, rank);
    } else if (get_rank() == rank) {
      auto head = head_for(own_.slots());
      recv(head, buddy);
      const Message got(head);
      for (const auto& tensor : got.tensors) recv(tensor, buddy);
      got.write_to(own_);
    }
  }
}

void require_buddies() {
  const auto hosts = get_env_int("GROUP_WORLD_SIZE", 1, 1 << 30).value_or(1);
  if (hosts * ranks_of_host() == get_world_size()) return;
  throw std::invalid_argument(
      "HealedTrainingOptions::buddy_copies: this host has " +
      std::to_string(ranks_of_host()) + " ranks, and the " +
      std::to_string(hosts) + " hosts have " +
      std::to_string(get_world_size()) +
      "; give all hosts the same --nproc-per-node");
}

}  // namespace lockstep::internal

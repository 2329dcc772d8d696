#include "lockstep/parallel/ddp/gradient_placement.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace lockstep {

struct GradientPlacement::Record {
  std::byte* data;
  size_t bytes;
  at::Tensor parameter;
  at::Tensor storage;
  const torch::autograd::Node* accumulator;
  std::atomic<bool> held{false};
  bool withdrawn = false;
};

struct GradientPlacement::Table {
  std::atomic<bool> armed{false};
  std::vector<std::shared_ptr<Record>> records;
};

namespace {

// Whether `node`, directly or through one that only shapes its result (the
// transpose of a Linear's weight), leads to `accumulator`.
bool feeds(const torch::autograd::Node& node,
           const torch::autograd::Node* accumulator) {
  return std::ranges::any_of(node.next_edges(), [&](const auto& edge) {
    const auto* next = edge.function.get();
    if (next == accumulator) return true;
    return next != nullptr && next->num_outputs() == 1 &&
           next->next_edge(0).function.get() == accumulator;
  });
}

}  // namespace

class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator* before) : before_(before) {}

  static PlacingAllocator& installed() {
    // Never destroyed: tensors of static storage outlive everything.
    static auto* allocator = [] {
      auto* made = new PlacingAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made);
      return made;
    }();
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= kPlacedBytes) {
      const auto* table = armed_here().get();
      if (table != nullptr && table->armed.load(std::memory_order_relaxed)) {
        if (auto placed = place(*table, bytes)) return placed;
      }
    }
    return before_->allocate(bytes);
  }
  // Of what raw_allocate() gave, which may be a slot.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }

  static std::shared_ptr<GradientPlacement::Table>& armed_here() {
    // Never destroyed: static objects allocate and end behind the thread's.
    thread_local auto& table = *new std::shared_ptr<GradientPlacement::Table>();
    return table;
  }

 private:
  using Record = GradientPlacement::Record;

  static c10::DataPtr place(const GradientPlacement::Table& table,
                            size_t bytes) {
    const auto node = torch::autograd::get_current_node();
    if (node == nullptr) return {};
    for (const auto& record : table.records) {
      // A gradient that is there already may stand in the slot itself.
      if (record->bytes != bytes || record->withdrawn ||
          record->parameter.grad().defined() ||
          !feeds(*node, record->accumulator)) {
        continue;
      }
      if (record->held.exchange(true)) continue;
      auto& self = installed();
      std::lock_guard lock(self.mutex_);
      self.given_[record->data] = record;
      // Context and data are one: raw_allocate() relies on it.
      return {record->data, record->data, &give_back, c10::Device(c10::kCPU)};
    }
    return {};
  }

  static void give_back(void* data) {
    auto& self = installed();
    std::shared_ptr<Record> record;
    {
      std::lock_guard lock(self.mutex_);
      const auto found = self.given_.find(data);
      if (found != self.given_.end()) {
        record = std::move(found->second);
        self.given_.erase(found);
      }
    }
    if (record) {
      record->held.store(false);
    } else {
      self.before_->raw_deleter()(data);
    }
  }

  c10::Allocator* before_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Record>> given_;  // slots in use
};

GradientPlacement::GradientPlacement() : table_(std::make_shared<Table>()) {}

GradientPlacement::~GradientPlacement() { leave_table(); }

// What the table holds, buckets and parameters, shall not stay with the thread.
void GradientPlacement::leave_table() {
  disarm();
  auto& armed = PlacingAllocator::armed_here();
  if (armed == table_) armed.reset();
}

void GradientPlacement::set_slots(const std::vector<Slot>& slots,
                                  size_t parameters) {
  leave_table();
  // Another thread may still look at the one before.
  table_ = std::make_shared<Table>();
  by_parameter_.assign(parameters, nullptr);
  for (const auto& [parameter, tensor, alias, storage, accumulator] : slots) {
    auto* data = static_cast<std::byte*>(alias.data_ptr());
    if (alias.nbytes() < kPlacedBytes ||
        reinterpret_cast<uintptr_t>(data) % kPlacedAlignment != 0) {
      continue;
    }
    auto record = std::make_shared<Record>();
    record->data = data;
    record->bytes = alias.nbytes();
    record->parameter = tensor;
    record->storage = storage;
    record->accumulator = accumulator;
    by_parameter_[parameter] = record;
    table_->records.push_back(std::move(record));
  }
  // Before there are threads that allocate, as far as can be.
  if (!table_->records.empty()) PlacingAllocator::installed();
}

void GradientPlacement::arm() {
  if (table_->records.empty()) return;
  table_->armed.store(true, std::memory_order_relaxed);
  PlacingAllocator::armed_here() = table_;
}

void GradientPlacement::disarm() {
  table_->armed.store(false, std::memory_order_relaxed);
}

bool GradientPlacement::held(size_t parameter) const {
  return parameter < by_parameter_.size() && by_parameter_[parameter] &&
         by_parameter_[parameter]->held.load();
}

void GradientPlacement::withdraw(size_t parameter) {
  if (by_parameter_[parameter]) by_parameter_[parameter]->withdrawn = true;
}

}  // namespace lockstep

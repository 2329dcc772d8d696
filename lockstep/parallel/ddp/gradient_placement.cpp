#include "lockstep/parallel/ddp/gradient_placement.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

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
  c10::DeleterFnPtr raw_deleter() const override {
    return before_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }

  static std::shared_ptr<GradientPlacement::Table>& armed_here() {
    thread_local std::shared_ptr<GradientPlacement::Table> table;
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
      return {record->data, new std::shared_ptr<Record>(record), &give_back,
              c10::Device(c10::kCPU)};
    }
    return {};
  }

  static void give_back(void* context) {
    auto* record = static_cast<std::shared_ptr<Record>*>(context);
    (*record)->held.store(false);
    delete record;
  }

  c10::Allocator* before_;
};

GradientPlacement::GradientPlacement() : table_(std::make_shared<Table>()) {}

GradientPlacement::~GradientPlacement() { disarm(); }

void GradientPlacement::set_slots(const std::vector<Slot>& slots,
                                  size_t parameters) {
  disarm();
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
}

void GradientPlacement::arm() {
  if (table_->records.empty()) return;
  PlacingAllocator::installed();
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

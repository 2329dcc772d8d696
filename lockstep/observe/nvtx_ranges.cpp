#include <nvtx3/nvToolsExt.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/observe/profiler.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

nvtxEventAttributes_t attributes_of(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();  // the tool copies it
  return attributes;
}

// The spans that this thread has pushed, the outermost first.
thread_local std::vector<uint64_t> pushed_spans;

class NvtxRanges final : public SpanObserver {
 public:
  explicit NvtxRanges(nvtxDomainHandle_t domain) : domain_(domain) {}

  void on_begin(const SpanBegin& begin) noexcept override {
    try {
      std::string name(begin.category);
      name += "::";
      name += begin.name;
      const auto attributes = attributes_of(name);
      if (begin.detached) {
        const std::lock_guard lock(mutex_);
        detached_[begin.id] = nvtxDomainRangeStartEx(domain_, &attributes);
      } else {
        pushed_spans.push_back(begin.id);
        nvtxDomainRangePushEx(domain_, &attributes);
      }
    } catch (const std::bad_alloc&) {
      // This span has no range.
    }
  }

  void on_end(const SpanEnd& end) noexcept override {
    if (!pushed_spans.empty() && pushed_spans.back() == end.id) {
      pushed_spans.pop_back();
      nvtxDomainRangePop(domain_);
      return;
    }
    const std::lock_guard lock(mutex_);
    const auto range = detached_.find(end.id);
    if (range == detached_.end()) return;
    nvtxDomainRangeEnd(domain_, range->second);
    detached_.erase(range);
  }

 private:
  const nvtxDomainHandle_t domain_;
  std::mutex mutex_;
  std::map<uint64_t, nvtxRangeId_t> detached_;
};

}  // namespace

bool emit_nvtx_ranges() {
  // Without a tool there is no domain.
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("lockstep");
  if (domain == nullptr) return false;
  // Until the process ends, also while its static objects are destroyed.
  (void)std::make_unique<SpanSubscription>(std::make_shared<NvtxRanges>(domain))
      .release();
  return true;
}

}  // namespace lockstep::internal

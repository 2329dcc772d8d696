// A tool that NVTX loads (NVTX_INJECTION64_PATH). It writes each range to the
// file that NVTX_TEST_FILE names: "push THREAD NAME", "pop THREAD", "start
// NUMBER NAME" and "end NUMBER".
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

std::FILE* file;
int domain;  // its address stands for the only domain
std::atomic<nvtxRangeId_t> ranges{0};

nvtxDomainHandle_t create_domain(const char* name) {
  std::fprintf(file, "domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  std::fprintf(file, "push %d %s\n", gettid(), event->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t) {
  std::fprintf(file, "pop %d\n", gettid());
  return 0;
}

nvtxRangeId_t start(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  const nvtxRangeId_t number = ++ranges;
  std::fprintf(file, "start %lu %s\n", number, event->message.ascii);
  return number;
}

void end(nvtxDomainHandle_t, nvtxRangeId_t number) {
  std::fprintf(file, "end %lu\n", number);
}

template <class Function>
NvtxFunctionPointer pointer_to(Function* function) {
  return reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(
      export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  file = std::fopen(std::getenv("NVTX_TEST_FILE"), "w");
  if (callbacks == nullptr || file == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions,
                                        &size) == 0) {
    return 0;
  }
  std::setvbuf(file, nullptr, _IOLBF, 0);  // the process is killed
  *functions[NVTX_CBID_CORE2_DomainCreateA] = pointer_to(create_domain);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = pointer_to(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = pointer_to(pop);
  *functions[NVTX_CBID_CORE2_DomainRangeStartEx] = pointer_to(start);
  *functions[NVTX_CBID_CORE2_DomainRangeEnd] = pointer_to(end);
  return 1;
}

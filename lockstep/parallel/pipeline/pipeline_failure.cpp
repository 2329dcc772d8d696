#include "lockstep/parallel/pipeline/pipeline_failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <vector>

namespace lockstep::internal {
namespace {

constexpr const char* kKey = "pipeline_failure";

// The first rank that fails by itself writes; the store may be gone.
void write_failure(c10d::Store& store, const std::string& text) {
  try {
    if (!store.check({kKey})) {
      store.set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
    }
  } catch (const std::exception&) {
    // The peers learn from the backend that this rank has left.
  }
}

std::optional<std::string> read_failure(c10d::Store& store) {
  try {
    if (!store.check({kKey})) return std::nullopt;
    const std::vector<uint8_t> bytes = store.get(kKey);
    return std::string(bytes.begin(), bytes.end());
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

void fail_together(ProcessGroup& group, const std::exception_ptr& failure,
                   const std::string& where) {
  const auto store = group.store();
  try {
    std::rethrow_exception(failure);
  } catch (const c10::DistError& error) {
    const auto cause = read_failure(*store);
    group.abort();
    if (!cause) throw;
    TORCH_CHECK_WITH(DistBackendError, false, *cause, " (noticed by rank ",
                     group.global_rank(group.rank()), " ", where, ")");
  } catch (const std::exception& error) {
    write_failure(*store,
                  c10::str("pipeline: rank ", group.global_rank(group.rank()),
                           " failed ", where, ": ", error.what()));
    group.abort();
    throw;
  } catch (...) {
    write_failure(*store,
                  c10::str("pipeline: rank ", group.global_rank(group.rank()),
                           " failed ", where));
    group.abort();
    throw;
  }
  std::rethrow_exception(failure);
}

}  // namespace lockstep::internal

#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace lockstep::internal::testing {

// Keeps the warnings of this thread, while the object lives, instead of
// printing them.
class KeptWarnings {
 public:
  const std::vector<std::string>& texts() const { return handler_.texts; }

 private:
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      texts.push_back(warning.msg());
    }
    std::vector<std::string> texts;
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace lockstep::internal::testing

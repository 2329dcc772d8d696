#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/event_loop.h"

namespace lockstep::internal {

// The Unix socket at which an agent answers questions about its job: of the
// commands that look at a job (job_link.h) and of its own workers
// (status_publisher.h). One connection is one question, a JSON object in one
// packet, and one answer, a JSON text in as many packets as it needs, after
// which the connection is closed; a descriptor may come with the first of them.
//
// The socket has the abstract name
//
//   lockstep-agent/<user id>/<process id>/<mark>/<run id>
//
// in which at most 40 letters, digits, '-', '_' and '.' of the run id are kept.
// The mark is random: containers that share a network have abstract names in
// common, and their process ids may be equal.
// It vanishes with the agent. Only this user and root get answers.
//
// For one thread.
class AgentSocket : public Pollable {
 public:
  static constexpr std::string_view kPrefix = "lockstep-agent/";
  // A question is not longer than this, and an answer not than the other: the
  // arguments of a program take 6 MiB at most.
  static constexpr size_t kQuestionBytes = 4096;
  static constexpr size_t kAnswerBytes = 64 << 20;

  struct Answer {
    std::string json;
    int descriptor = -1;  // sent with it; stays the caller's
  };
  // `asker` is the process that asks. Must not throw.
  using Respond =
      std::function<Answer(const std::string& question, pid_t asker)>;

  // Returns the mark of this process: eight hexadecimal digits.
  static const std::string& mark();
  // Returns what a name keeps of a run id.
  static std::string name_part(const std::string& run_id);

  // Throws std::system_error if there is no socket.
  AgentSocket(const std::string& run_id, Respond respond);

  const std::string& name() const { return name_; }
  void add_poll_entries(std::vector<pollfd>& entries) const override;
  std::optional<Deadline> due() const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;

 private:
  struct Asker {
    FileDescriptor socket;
    std::string rest{};  // of the answer, which is still to be sent
  };

  // Both return whether nothing more is expected of the asker.
  bool serve(Asker& asker) const;
  static bool send_rest(Asker& asker, int descriptor = -1);
  void accept_new();

  std::string name_;
  Respond respond_;
  FileDescriptor listener_;
  std::vector<Asker> askers_;
  // Set after there was no descriptor for a new asker.
  std::optional<Deadline> ignored_until_{};
};

}  // namespace lockstep::internal

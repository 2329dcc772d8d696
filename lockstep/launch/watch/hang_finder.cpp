#include "lockstep/launch/watch/hang_finder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/number_list.h"
#include "lockstep/base/system_file.h"
#include "lockstep/base/whole_file.h"
#include "lockstep/launch/watch/source_finder.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// For how long a look has the workers publish: they do so at once and twice
// after, so that a busy machine delays none to the next look.
constexpr milliseconds kPublishTime = 3 * StatusBoard::kInterval;
// How long the workers have to write their stacks, and how often to look
// whether they have.
constexpr milliseconds kStacksAllowance{5'000};
constexpr milliseconds kStacksLook{50};
// So many lines say what the other ranks do.
constexpr size_t kMostLines = 8;

// Returns when the file was last touched; 0 if there is none.
int64_t touched_ns(const std::filesystem::path& file) {
  struct stat facts {};
  if (::stat(file.c_str(), &facts) != 0) return 0;
  return facts.st_mtim.tv_sec * 1'000'000'000 + facts.st_mtim.tv_nsec;
}

std::string ago(int64_t then_ns) {
  char text[48];
  std::snprintf(text, sizeof text, "%.1f s ago",
                static_cast<double>(steady_ns() - then_ns) / 1e9);
  return text;
}

}  // namespace

HangFinder::HangFinder(milliseconds allowed, bool alone, StatusBoard* board,
                       std::filesystem::path attempt)
    : allowed_(allowed),
      board_(board),
      attempt_(std::move(attempt)),
      watch_(allowed, alone),
      next_(Deadline::after(milliseconds(0))) {}

std::vector<HungWorker> HangFinder::look(
    const std::vector<WorkerStatus>& workers) {
  if (!next_.expired()) return {};
  next_ = Deadline::after(std::chrono::ceil<milliseconds>(watch_.interval()));
  const Progress progress = read(workers);
  const auto hanging = watch_.look(progress);
  if (board_ != nullptr) board_->watch(kPublishTime);
  if (hanging.empty()) {
    if (answers_until_) drop_stacks(workers);
    answers_until_.reset();
    return {};
  }
  if (!answers_until_) {
    answers_until_ = Deadline::after(kStacksAllowance);
    if (board_ != nullptr) request_ = board_->ask_stacks();
  } else if (all_have_answered(progress) || answers_until_->expired()) {
    return found(hanging, workers, progress);
  }
  next_ = Deadline::after(kStacksLook);
  return {};
}

HangFinder::Progress HangFinder::read(
    const std::vector<WorkerStatus>& workers) {
  Progress all(workers.size());
  told_.assign(workers.size(), std::nullopt);
  for (size_t at = 0; at < workers.size(); ++at) {
    const WorkerStatus& worker = workers[at];
    if (worker.exit_code) continue;
    auto& told = told_[at];
    if (board_ != nullptr) told = board_->read(worker.local_rank);
    if (told && told->has_left != 0) told.reset();
    const int64_t touched = touched_ns(
        attempt_ / std::to_string(worker.local_rank) / kProgressFile);
    if (!told && touched == 0) continue;
    WorkerProgress& progress = all[at].emplace();
    if (told) {
      const auto bar = std::hash<std::string_view>()(told->progress.view());
      progress.counts = {told->steps,
                         told->samples,
                         told->operations,
                         told->last_operation_ns,
                         told->last_snapshot_ns,
                         static_cast<int64_t>(bar),
                         touched};
      progress.active_ns = told->last_operation_ns;
      progress.in_operation = told->current_since_ns > 0;
    } else {
      progress.counts.back() = touched;
    }
    const auto usage = usage_of(told ? told->pid : worker.pid);
    progress.stopped = usage && (usage->state == 'T' || usage->state == 't');
  }
  return all;
}

bool HangFinder::all_have_answered(const Progress& progress) const {
  for (size_t at = 0; at < told_.size(); ++at) {
    if (told_[at] && !progress[at]->stopped && told_[at]->stacks < request_) {
      return false;
    }
  }
  return true;
}

// The workers go on after all.
void HangFinder::drop_stacks(const std::vector<WorkerStatus>& workers) const {
  for (const WorkerStatus& worker : workers) {
    RankStacks dropped{.rank = worker.rank};
    take_stacks(attempt_, request_, dropped);
  }
}

std::string HangFinder::doing(const WorkerStatus& worker,
                              const WorkerProgress& progress) const {
  const auto& told = told_[static_cast<size_t>(worker.local_rank)];
  std::string text = progress.stopped ? "stopped by a signal; " : "";
  if (!told) return text + "its progress file was not touched";
  // The last notice of a stopped worker is not quite what it does.
  if (progress.stopped) text += "a moment before ";
  if (progress.in_operation) {
    text += "in " + current_operation(*told);
  } else {
    text += "in no operation";
    const std::string last = last_operation(*told);
    if (!last.empty()) {
      text += ", the last one was " + last + " " + ago(told->last_operation_ns);
    }
  }
  if (told->steps > 0) text += ", in step " + std::to_string(told->steps);
  return text;
}

std::vector<HungWorker> HangFinder::found(
    const std::vector<int>& hanging, const std::vector<WorkerStatus>& workers,
    const Progress& progress) {
  std::vector<HungWorker> hung;
  std::vector<RankStacks> stacks;
  std::map<std::string, std::vector<int>> others;
  for (const WorkerStatus& worker : workers) {
    const auto at = static_cast<size_t>(worker.local_rank);
    if (!progress[at]) continue;
    RankStacks own{.rank = worker.rank, .pid = worker.pid};
    if (told_[at]) own.operation = current_operation(*told_[at]);
    if (!take_stacks(attempt_, request_, own)) {
      own.missing = progress[at]->stopped ? "it is stopped by a signal"
                                          : "it does not answer";
    }
    stacks.push_back(std::move(own));
    if (std::ranges::find(hanging, worker.local_rank) == hanging.end()) {
      const bool moves = watch_.standing(worker.local_rank) < allowed_ / 2;
      others[moves ? "makes progress" : doing(worker, *progress[at])].push_back(
          worker.rank);
    }
  }
  explain(stacks);
  for (const int local_rank : hanging) {
    const auto at = static_cast<size_t>(local_rank);
    const WorkerStatus& worker = workers[at];
    HungWorker one{.local_rank = local_rank};
    one.message = "no progress for " +
                  seconds_text(std::chrono::round<std::chrono::seconds>(
                      watch_.standing(local_rank))) +
                  ": " + doing(worker, *progress[at]);
    if (!watch_.alone() && progress[at]->in_operation &&
        !progress[at]->stopped) {
      one.waits_for_others = true;
      one.message += "\nthe rank for which it waits may be on another node";
    }
    const auto own = std::ranges::find(stacks, worker.rank, &RankStacks::rank);
    const auto main_thread =
        std::ranges::find(own->threads, own->pid, &ThreadStack::thread);
    if (main_thread != own->threads.end()) one.stack = main_thread->frames;
    hung.push_back(std::move(one));
  }
  size_t lines = 0;
  for (const auto& [text, ranks] : others) {
    if (++lines > kMostLines) break;
    hung.front().message += "\n" + name_numbers("rank", ranks) + ": " + text;
  }
  // If the disk is full, the frames of the failure's report must do.
  write_own_file(attempt_ / kStacksFile, stacks_text(stacks));
  return hung;
}

bool HangFinder::watches_nobody() {
  if (has_warned_ || watch_.watches() || watch_.awake() < allowed_)
    return false;
  return has_warned_ = true;
}

}  // namespace lockstep::internal

#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace examples {

// The arguments that all programs of the tutorial take.
struct Job {
  int64_t total_epochs = 0;
  int64_t save_every = 0;  // epochs
  int64_t batch_size = 32;
  // "cross_entropy" is the tutorial's loss. The tutorial's model has one
  // output, for which this loss is 0 without a gradient, so nothing is learned.
  // With "mse" the model learns.
  std::string loss = "cross_entropy";
  std::string snapshot = "snapshot.pt";
};

// Adds total_epochs save_every [--batch_size N] [--loss NAME], with underscores
// or dashes, as the tutorial's programs have them.
void add_job_arguments(CLI::App& app, Job& job);

// Adds [--snapshot PATH], for the programs that resume from a snapshot.
void add_snapshot_argument(CLI::App& app, Job& job);

}  // namespace examples

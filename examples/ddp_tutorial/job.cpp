#include "examples/ddp_tutorial/job.h"

#include <CLI/CLI.hpp>

namespace examples {

void add_job_arguments(CLI::App& app, Job& job) {
  app.description("simple distributed training job");
  app.add_option("total_epochs,--total_epochs,--total-epochs", job.total_epochs,
                 "Total epochs to train the model")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("save_every,--save_every,--save-every", job.save_every,
                 "How often to save, in epochs")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch_size,--batch-size", job.batch_size,
                 "Input batch size on each device (default: 32)")
      ->check(CLI::Range(1, 2048));
  app.add_option("--loss", job.loss,
                 "Loss: cross_entropy, as in the tutorial, with which nothing "
                 "is learned, or mse (default: cross_entropy)")
      ->check(CLI::IsMember({"cross_entropy", "mse"}));
}

void add_snapshot_argument(CLI::App& app, Job& job) {
  app.add_option("--snapshot", job.snapshot,
                 "Path of the snapshot (default: snapshot.pt)");
}

}  // namespace examples

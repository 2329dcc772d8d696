// The first program of PyTorch's "DDP tutorial series": one process, no
// process group. The other three do the same with more ranks.
//
//   build/bin/single_gpu 50 10
//
// prints
//
//   [CPU0] Epoch 10 | Batchsize: 32 | Steps: 64
//   Epoch 10 | Training checkpoint saved at checkpoint.pt
//
// In Python: model.load_state_dict(torch.load("checkpoint.pt")).

#include <CLI/CLI.hpp>

#include "examples/ddp_tutorial/trainer.h"
#include "examples/program.h"

int main(int argc, char** argv) {
  examples::Job job;
  CLI::App app;
  examples::add_job_arguments(app, job);
  return examples::run_program(app, argc, argv, [&] {
    examples::Trainer trainer(job, /*rank=*/0);
    for (int64_t epoch = 0; epoch < job.total_epochs; ++epoch) {
      trainer.run_epoch(epoch, trainer.layer());
      if (epoch % job.save_every == 0) {
        examples::save_checkpoint(epoch, *trainer.layer());
      }
    }
  });
}

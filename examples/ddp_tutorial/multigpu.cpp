// "Multi GPU training with DDP", the second program of PyTorch's "DDP tutorial
// series". It starts its own ranks: one per GPU, or without GPUs one per core.
//
//   build/bin/multigpu 50 10
//   build/bin/multigpu 50 10 --nprocs 2
//
// prints, from each of two ranks,
//
//   [CPU0] Epoch 10 | Batchsize: 32 | Steps: 32
//   Epoch 10 | Training checkpoint saved at checkpoint.pt      (rank 0)

#include <stdexcept>

#include <lockstep/launch/process/process_count.h>
#include <CLI/CLI.hpp>

#include "examples/ddp_tutorial/trainer.h"
#include "examples/program.h"

namespace {

void train(const examples::Job& job, int rank) {
  auto group = lockstep::init_process_group();
  examples::Trainer trainer(job, rank);
  lockstep::DistributedDataParallel<torch::nn::Linear> model(trainer.layer());
  for (int64_t epoch = 0; epoch < job.total_epochs; ++epoch) {
    trainer.run_epoch(epoch, std::ref(model));
    if (rank == 0 && epoch % job.save_every == 0) {
      examples::save_checkpoint(epoch, *model.module());
    }
  }
}

// Returns what is wrong with `text`, or an empty string, as CLI11 expects it.
std::string check_process_count(const std::string& text) {
  try {
    lockstep::resolve_process_count(text);
    return {};
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

}  // namespace

int main(int argc, char** argv) {
  examples::Job job;
  std::string nprocs = "auto";
  CLI::App app;
  examples::add_job_arguments(app, job);
  app.add_option("--nprocs", nprocs,
                 "Ranks: a number, gpu, cpu (cores), or auto: GPUs if there "
                 "are any, else cores (default: auto)")
      ->check(check_process_count);
  return examples::run_program(app, argc, argv, [&] {
    lockstep::spawn([&](int rank) { train(job, rank); },
                    lockstep::resolve_process_count(nprocs));
  });
}

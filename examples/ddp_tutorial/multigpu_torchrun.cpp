// "Fault-tolerant Distributed Training with torchrun", the third program of
// PyTorch's "DDP tutorial series". A launcher starts its ranks, and it resumes
// from a snapshot when it is started again.
//
//   build/bin/lockstep run --standalone --nproc-per-node=2
//       build/bin/multigpu_torchrun 50 10
//
// prints, from each rank,
//
//   [CPU0] Epoch 10 | Batchsize: 32 | Steps: 32
//   Epoch 10 | Training snapshot saved at snapshot.pt       (rank 0)
//
// and, started again,
//
//   Loading snapshot
//   Resuming training from snapshot at Epoch 11

#include <CLI/CLI.hpp>

#include "examples/ddp_tutorial/trainer.h"
#include "examples/program.h"

int main(int argc, char** argv) {
  examples::Job job;
  CLI::App app;
  examples::add_job_arguments(app, job);
  examples::add_snapshot_argument(app, job);
  return examples::run_program(app, argc, argv, [&] {
    auto group = lockstep::init_process_group();
    examples::train_with_snapshots(job, lockstep::get_local_rank());
  });
}

// "Multinode training", the last program of PyTorch's "DDP tutorial series":
// multigpu_torchrun on several hosts, which prints the rank's number in the
// whole job. Run this on each of two hosts, with R = 0 and R = 1 and the same
// endpoint:
//
//   build/bin/lockstep run --nnodes=2 --node-rank=R --rdzv-id=456
//       --rdzv-backend=c10d --rdzv-endpoint=HOST:29603 --nproc_per_node=8
//       build/bin/multinode 50 10
//
// prints, from each of the 16 ranks,
//
//   [CPU12] Epoch 10 | Batchsize: 32 | Steps: 4
//   Epoch 10 | Training snapshot saved at snapshot.pt       (rank 0)
//
// Rank 0 writes the snapshot and all ranks read it, so the hosts must share the
// folder. If some ranks do not have the file, every rank names them and ends.

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
    examples::train_with_snapshots(job, lockstep::get_rank());
  });
}

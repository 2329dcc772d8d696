"""Checks what the compiler says of options that there are not, and of those that
are missing: a few lines, of which the first shows the line of the user, and not a
list of constructors.

    compile_errors.py COMPILER [-I... -isystem...]

Prints a table of the mistakes and of the lines for each (docs/guide.md). Clang
says it in other words, so this is for GCC.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

# The most lines, and what they must say: of a class, of a function, of an option
# that must be given.
DELETED = (9, "no such option")
PLAIN = (10, "Options")
MISSING = (10, "Required")
MISTAKES = [
    ("DataLoader a(data, sampler, {.batchsize = 2})", *DELETED),
    ("DataLoader a(data, batches, {.workers = 2})", *DELETED),
    ("DataLoader a(data, sampler, {.batch_size = 2, .shuffle = true})", *DELETED),
    ("DataLoader<TensorDataset> a(data, sampler, {.batchsize = 2})", *DELETED),
    ("DistributedSampler a(data, {.shufle = true})", *DELETED),
    ("DistributedSampler a(100, {.shufle = true})", *DELETED),
    ("RandomSampler a(data, {.sede = 1})", *DELETED),
    ("optim::SGD a(model->parameters(), {.learning_rate = 0.1})", *DELETED),
    ("optim::Adam a(model->parameters(), {.learning_rate = 0.1})", *DELETED),
    ("optim::AdamW a(model->parameters(), {.learning_rate = 0.1})", *DELETED),
    ("DistributedDataParallel a(model, {.bucket_cap = 25})", *DELETED),
    ("FullyShard a(model, {.reshard = false})", *DELETED),
    ("AveragedModel<torch::nn::Linear> a(model, {.decay = 0.9})", *DELETED),
    ("ZeroRedundancyOptimizer<torch::optim::Adam> a(model->parameters(), {}, "
     "{.overlap = true})", *DELETED),
    ("optim::StepLR a(optimizer, {.stepsize = 10})", *DELETED),
    ("optim::LinearLR a(optimizer, {.start = 10})", *DELETED),
    ("optim::StepLR a(optimizer, {.gamma = 0.5})", *MISSING),
    ("optim::StepLR a(optimizer)", *MISSING),
    ("metrics::ConfusionMatrix a({})", *MISSING),
    ("all_reduce(tensor, {.operation = ReduceOp::SUM})", *PLAIN),
    ("init_process_group(\"gloo\", {.time_out = seconds(3)})", *PLAIN),
    ("save_snapshot(\"a\", state, {.sharde = true})", *PLAIN),
    ("spawn([](int) {}, 2, {.joins = true})", *PLAIN),
]
# The mistakes of programs that are written as in Python.
RIGHT = [
    "optim::CosineAnnealingLR a(optimizer, {.T_max = 10})",
    "optim::CosineAnnealingWarmRestarts a(optimizer, {.T_0 = 10, .T_mult = 2})",
    "optim::LinearLR a(optimizer)",
    "DataLoader a(data, sampler)",
    "DataLoader a(data, batches, {.num_workers = 2})",
    "DataLoader a(data, sampler, {}, [](auto samples) { return samples; })",
    "DataLoader<TensorDataset> a(data, sampler)",
    "DistributedSampler a(data)",
    "DistributedSampler a(100)",
    "DistributedSampler a(100u, {.shuffle = false})",
    "RandomSampler a(data, {.seed = 1})",
    "optim::SGD a(model->parameters())",
    "optim::SGD a({tensor}, {.lr = 0.1})",
    "optim::AdamW a(model->parameters(), torch::optim::AdamWOptions(0.1))",
    "DistributedDataParallel a(model)",
    "DistributedDataParallel a(model, DistributedDataParallelOptions{})",
    "FullyShard a(model, {.reshard_after_forward = false})",
    "FullyShard<torch::nn::Linear> a([] { return torch::nn::Linear(1, 1); })",
    "AveragedModel<torch::nn::Linear> a(model)",
    "ZeroRedundancyOptimizer<torch::optim::Adam> a(model->parameters())",
]
HEAD = """#include <torch/torch.h>
#include <lockstep/lockstep.h>
#include <lockstep/model_parallel.h>
using namespace lockstep;
using std::chrono::seconds;
void calls(TensorDataset& data, DistributedSampler& sampler,
           BucketBatchSampler& batches, torch::nn::Linear model,
           torch::optim::Adam& optimizer, at::Tensor& tensor,
           TrainingState& state) {
"""


def main():
    compiler, *arguments = sys.argv[1:]
    calls = [code for code, *_ in MISTAKES] + RIGHT
    source = HEAD + "".join(f"  {{ {code}; }}\n" for code in calls) + "}\n"
    with tempfile.TemporaryDirectory() as folder:
        name = pathlib.Path(folder, "calls.cpp")
        name.write_text(source)
        said = subprocess.run(
            [compiler, "-std=c++20", *arguments, "-fsyntax-only", name],
            capture_output=True, text=True, check=False).stderr
    first = HEAD.count("\n") + 1
    of_line, number = {}, 0
    for line in said.splitlines():
        if found := re.match(rf"{re.escape(str(name))}:(\d+):\d+: error", line):
            number = int(found[1])
        of_line.setdefault(number, []).append(line)
    faults = []
    for at, code in enumerate(calls):
        lines = of_line.get(first + at, [])
        most, words = MISTAKES[at][1:] if at < len(MISTAKES) else (0, "")
        print(f"{len(lines):3} {code}")
        text = "\n".join(lines)
        if len(lines) > most or bool(lines) != bool(most) or words not in text:
            faults.append(f"at most {most} lines with '{words}' are allowed for "
                          f"{code}, not these {len(lines)}:\n{text}")
        elif lines and code not in lines[1]:
            faults.append(f"the second line does not show {code}:\n{text}")
    if faults:
        sys.exit("\n\n".join(faults))


main()

#include "lockstep/comm/mpi/operations.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace lockstep::internal::mpi {
namespace {

char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

// Runs `start(elements, offset, request)` for parts that an int can count.
template <typename Start>
void in_parts(Round& round, const char* call, const at::Tensor& tensor,
              Start&& start) {
  for (int64_t done = 0; done < tensor.numel(); done += max_count()) {
    const auto count = std::min(max_count(), tensor.numel() - done);
    const auto size = tensor.element_size();
    round.run(call, count * size, [&](MPI_Request* request) {
      return start(static_cast<int>(count), bytes_of(tensor) + done * size,
                   request);
    });
  }
}

void average(const Round& round, const at::Tensor& tensor, const ReduceOp& op) {
  if (op == ReduceOp::AVG) tensor.div_(round.size());
}

// Returns the tensors one after the other, in memory that `round` keeps.
const at::Tensor& joined(Round& round, const Tensors& tensors) {
  Tensors flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.flatten());
  return round.keep(at::cat(flat));
}

int64_t elements_of(const Tensors& tensors) {
  int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  return count;
}

const at::Tensor& room_for(Round& round, const Tensors& tensors) {
  return round.keep(at::empty({elements_of(tensors)}, tensors[0].options()));
}

void take_apart(const at::Tensor& joint, const Tensors& tensors) {
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(joint.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

// A stretch of memory that goes to a rank, or comes from it.
struct Stretch {
  char* data;
  size_t bytes;
};

// Every rank exchanges a stretch with every rank. The types hold absolute
// addresses, because the displacements of MPI's calls are ints that count
// bytes.
void exchange(Round& round, const std::vector<Stretch>& sends,
              const std::vector<Stretch>& receives) {
  const auto ranks = sends.size();
  auto& zeros = round.numbers(ranks, 0);
  struct Side {
    std::vector<int>& counts;
    std::vector<MPI_Datatype>& types;
  };
  size_t total = 0;
  std::vector<MPI_Datatype> made;
  const auto describe = [&](const std::vector<Stretch>& stretches) {
    Side side{round.numbers(ranks, 0), round.types(ranks)};
    for (size_t i = 0; i < ranks; ++i) {
      if (stretches[i].bytes == 0) continue;
      total += stretches[i].bytes;
      const auto& bytes = round.keep(Bytes(stretches[i].bytes));
      MPI_Aint address = 0;
      int count = bytes.count();
      auto type = bytes.type();
      const auto guard = calls_guard();
      check(MPI_Get_address(stretches[i].data, &address), "MPI_Get_address");
      check(MPI_Type_create_struct(1, &count, &address, &type, &side.types[i]),
            "MPI_Type_create_struct");
      check(MPI_Type_commit(&side.types[i]), "MPI_Type_commit");
      made.push_back(side.types[i]);
      side.counts[i] = 1;
    }
    return side;
  };
  const auto out = describe(sends);
  const auto in = describe(receives);
  round.run("MPI_Ialltoallw", total, [&](MPI_Request* request) {
    return MPI_Ialltoallw(MPI_BOTTOM, out.counts.data(), zeros.data(),
                          out.types.data(), MPI_BOTTOM, in.counts.data(),
                          zeros.data(), in.types.data(), round.comm(), request);
  });
  // Only here: if the call above has failed, MPI keeps the types.
  const auto guard = calls_guard();
  for (auto& type : made) MPI_Type_free(&type);
}

}  // namespace

void all_reduce(Round& round, const at::Tensor& tensor, const ReduceOp& op) {
  const auto how = reduction(tensor.scalar_type(), op);
  in_parts(round, "MPI_Iallreduce", round.keep(tensor),
           [&](int count, char* data, MPI_Request* request) {
             return MPI_Iallreduce(MPI_IN_PLACE, data, count, how.type, how.op,
                                   round.comm(), request);
           });
  average(round, tensor, op);
}

void all_reduce_coalesced(Round& round, const Tensors& tensors,
                          const ReduceOp& op) {
  if (tensors.size() == 1) return all_reduce(round, tensors[0], op);
  const auto& joint = joined(round, tensors);
  all_reduce(round, joint, op);
  take_apart(joint, tensors);
}

void all_reduce_sparse(Round& round, const at::Tensor& tensor) {
  const auto own = tensor.coalesce();
  const auto counts = at::empty({round.size()}, at::kLong);
  all_gather(round, counts, at::full({1}, own._nnz(), at::kLong));
  Tensors indices;
  Tensors values;
  for (int rank = 0; rank < round.size(); ++rank) {
    const auto entries = counts[rank].item<int64_t>();
    indices.push_back(
        at::empty({own.sparse_dim(), entries}, own._indices().options()));
    auto shape = own._values().sizes().vec();
    shape[0] = entries;
    values.push_back(at::empty(shape, own._values().options()));
  }
  all_gather(round, indices, own._indices().contiguous());
  all_gather(round, values, own._values().contiguous());
  tensor.copy_(at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0),
                                     tensor.sizes(), tensor.options())
                   .coalesce());
}

void reduce(Round& round, const at::Tensor& tensor, int root,
            const ReduceOp& op) {
  const auto how = reduction(tensor.scalar_type(), op);
  const bool here = round.rank() == root;
  in_parts(round, "MPI_Ireduce", round.keep(tensor),
           [&](int count, char* data, MPI_Request* request) {
             return MPI_Ireduce(here ? MPI_IN_PLACE : data,
                                here ? data : nullptr, count, how.type, how.op,
                                root, round.comm(), request);
           });
  if (here) average(round, tensor, op);
}

void reduce_scatter(Round& round, const at::Tensor& output,
                    const Tensors& inputs, const ReduceOp& op) {
  const auto how = reduction(output.scalar_type(), op);
  if (elements_of(inputs) > max_count()) {
    // MPI's own call cannot count that many: one reduction for each rank.
    for (int root = 0; root < round.size(); ++root) {
      const bool own = root == round.rank();
      if (own) output.copy_(inputs[root].view(output.sizes()));
      reduce(round, own ? output : inputs[root], root, op);
    }
    return;
  }
  auto& counts = round.numbers(inputs.size(), 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    counts[i] = static_cast<int>(inputs[i].numel());
  }
  const auto& input = joined(round, inputs);
  if (input.numel() == 0) return;
  round.keep(output);
  round.run("MPI_Ireduce_scatter", input.nbytes(), [&](MPI_Request* request) {
    return MPI_Ireduce_scatter(bytes_of(input), bytes_of(output), counts.data(),
                               how.type, how.op, round.comm(), request);
  });
  average(round, output, op);
}

void reduce_scatter(Round& round, const at::Tensor& output,
                    const at::Tensor& input, const ReduceOp& op) {
  if (output.numel() == 0) return;
  if (input.numel() > max_count()) {
    return reduce_scatter(round, output, input.flatten().split(output.numel()),
                          op);
  }
  const auto how = reduction(output.scalar_type(), op);
  round.keep(input);
  round.keep(output);
  round.run(
      "MPI_Ireduce_scatter_block", input.nbytes(), [&](MPI_Request* request) {
        return MPI_Ireduce_scatter_block(
            bytes_of(input), bytes_of(output), static_cast<int>(output.numel()),
            how.type, how.op, round.comm(), request);
      });
  average(round, output, op);
}

void broadcast(Round& round, const at::Tensor& tensor, int root) {
  round.keep(tensor);
  const auto& bytes = round.keep(Bytes(tensor.nbytes()));
  round.run("MPI_Ibcast", tensor.nbytes(), [&](MPI_Request* request) {
    return MPI_Ibcast(bytes_of(tensor), bytes.count(), bytes.type(), root,
                      round.comm(), request);
  });
}

void all_gather(Round& round, const at::Tensor& output,
                const at::Tensor& input) {
  round.keep(output);
  round.keep(input);
  const auto& bytes = round.keep(Bytes(input.nbytes(), round.size()));
  round.run("MPI_Iallgather", output.nbytes(), [&](MPI_Request* request) {
    return MPI_Iallgather(bytes_of(input), bytes.count(), bytes.type(),
                          bytes_of(output), bytes.count(), bytes.type(),
                          round.comm(), request);
  });
}

void all_gather(Round& round, const Tensors& outputs, const at::Tensor& input) {
  const bool even = std::all_of(
      outputs.begin(), outputs.end(),
      [&](const at::Tensor& one) { return one.nbytes() == input.nbytes(); });
  if (even) {
    const auto& joint = room_for(round, outputs);
    all_gather(round, joint, input);
    take_apart(joint, outputs);
    return;
  }
  round.keep(input);
  std::vector<Stretch> receives;
  for (const auto& output : outputs) {
    round.keep(output);
    receives.push_back({bytes_of(output), output.nbytes()});
  }
  exchange(
      round,
      std::vector<Stretch>(outputs.size(), {bytes_of(input), input.nbytes()}),
      receives);
}

void gather(Round& round, const Tensors& outputs, const at::Tensor& input,
            int root) {
  const bool here = round.rank() == root;
  const auto& joint = here ? room_for(round, outputs) : round.keep({});
  round.keep(input);
  const auto& bytes = round.keep(Bytes(input.nbytes(), round.size()));
  round.run(
      "MPI_Igather", input.nbytes() * round.size(), [&](MPI_Request* request) {
        return MPI_Igather(bytes_of(input), bytes.count(), bytes.type(),
                           here ? bytes_of(joint) : nullptr, bytes.count(),
                           bytes.type(), root, round.comm(), request);
      });
  if (here) take_apart(joint, outputs);
}

void scatter(Round& round, const at::Tensor& output, const Tensors& inputs,
             int root) {
  const bool here = round.rank() == root;
  const auto& joint = here ? joined(round, inputs) : round.keep({});
  round.keep(output);
  const auto& bytes = round.keep(Bytes(output.nbytes(), round.size()));
  round.run("MPI_Iscatter", output.nbytes() * round.size(),
            [&](MPI_Request* request) {
              return MPI_Iscatter(here ? bytes_of(joint) : nullptr,
                                  bytes.count(), bytes.type(), bytes_of(output),
                                  bytes.count(), bytes.type(), root,
                                  round.comm(), request);
            });
}

void all_to_all(Round& round, const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& receives,
                const std::vector<int64_t>& sends) {
  const auto cut = [&](const at::Tensor& tensor,
                       const std::vector<int64_t>& counts) {
    round.keep(tensor);
    std::vector<Stretch> stretches;
    auto* next = bytes_of(tensor);
    for (const auto count : counts) {
      const size_t bytes = count * tensor.element_size();
      stretches.push_back({next, bytes});
      next += bytes;
    }
    return stretches;
  };
  exchange(round, cut(input, sends), cut(output, receives));
}

void barrier(Round& round) {
  round.run("MPI_Ibarrier", 0, [&](MPI_Request* request) {
    return MPI_Ibarrier(round.comm(), request);
  });
}

}  // namespace lockstep::internal::mpi

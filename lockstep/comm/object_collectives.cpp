#include "lockstep/comm/object_collectives.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/trace/current_call.h"

namespace lockstep {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 30;

// Decoding recurses: an object of another rank must not use up the stack.
constexpr int kMaxDepth = 1000;

// Measures how deep CBOR data is nested before anything recurses over its
// value.
class DepthLimit final : public nlohmann::json_sax<Object> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ <= kMaxDepth; }
  bool end_object() override { return --depth_ >= 0; }
  bool start_array(std::size_t) override { return ++depth_ <= kMaxDepth; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t, const std::string&,
                   const Object::exception&) override {
    return false;  // from_cbor() says what is wrong
  }
  bool exceeded() const { return depth_ > kMaxDepth; }

 private:
  int depth_ = 0;
};

// Returns why the object cannot be sent, or nullptr if it can.
const char* obstacle(const Object& object, int depth = 1) {
  if (object.is_binary() && object.get_binary().has_subtype()) {
    return "holds a byte string with a subtype, which CBOR does not keep; give "
           "it without the subtype";
  }
  if (!object.is_structured()) return nullptr;
  if (depth > kMaxDepth) return "is nested more than 1000 deep; flatten it";
  for (const auto& part : object) {
    if (const char* found = obstacle(part, depth + 1)) return found;
  }
  return nullptr;
}

// The parts of one operation: its errors, and the options of the collectives
// that it consists of.
struct ObjectCall {
  ObjectCall(const char* name, const ObjectOptions& options)
      : call(name, options.group, options.timeout),
        device(call.group->control_device()),
        deadline(internal::Deadline::after(call.timeout)) {
    call.backend();  // throws if the group was destroyed
  }

  // Returns options for the next collective, with what is left of the time.
  CollectiveOptions next() const {
    return {.group = call.group,
            .timeout =
                std::max(deadline.remaining(), std::chrono::milliseconds(1))};
  }
  int size() const { return call.group->size(); }
  bool is_member(int member) const { return call.group->rank() == member; }

  at::Tensor encode(const Object& object) const {
    if (const char* why = obstacle(object)) {
      throw call.mistake(std::string("the object ") + why);
    }
    const auto bytes = Object::to_cbor(object);
    if (static_cast<int64_t>(bytes.size()) > kMaxBytes) {
      throw call.mistake(c10::str("the object is ", bytes.size(),
                                  " bytes as CBOR; allowed are ", kMaxBytes,
                                  "; send large data as tensors"));
    }
    auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return tensor.to(device);
  }

  [[noreturn]] void refuse(int member, const std::string& what) const {
    const int rank = call.group->global_rank(member);
    call.fail(deadline, std::logic_error(c10::str("rank ", rank, " ", what)));
  }

  Object decode(const at::Tensor& tensor, int64_t size, int member) const {
    auto bytes = tensor.narrow(0, 0, size).cpu();
    const auto* begin = bytes.const_data_ptr<uint8_t>();
    DepthLimit limit;
    Object::sax_parse(begin, begin + size, &limit,
                      Object::input_format_t::cbor);
    if (limit.exceeded()) {
      refuse(member, c10::str("sent an object that is nested more than ",
                              kMaxDepth, " deep"));
    }
    try {
      return Object::from_cbor(begin, begin + size);
    } catch (const Object::exception& error) {
      refuse(member,
             c10::str("sent bytes that are not an object: ", error.what()));
    }
  }

  at::Tensor sizes(const std::vector<int64_t>& of) const {
    return at::tensor(of, at::kLong).to(device);
  }
  at::Tensor bytes(int64_t count) const {
    return at::empty({count}, at::TensorOptions(at::kByte).device(device));
  }
  // `size` comes from another rank, so it may be anything.
  int64_t checked_size(int64_t size, int member) const {
    if (size >= 0 && size <= kMaxBytes) return size;
    refuse(member,
           c10::str("announced ", size, " bytes; allowed are ", kMaxBytes));
  }
  // Returns the sizes of all ranks, on every rank.
  std::vector<int64_t> exchange_sizes(int64_t own) const {
    auto all = sizes(std::vector<int64_t>(size()));
    all_gather_into_tensor(all, sizes({own}), next());
    auto host = all.cpu();
    const auto* first = host.const_data_ptr<int64_t>();
    std::vector<int64_t> counts(first, first + size());
    for (int member = 0; member < size(); ++member) {
      checked_size(counts[member], member);
    }
    return counts;
  }

  internal::Call call;
  c10::Device device;
  internal::Deadline deadline;
};

}  // namespace

Object broadcast_object(const Object& object, int src,
                        const ObjectOptions& options) {
  const internal::UserFunction function("broadcast_object()");
  const ObjectCall job("broadcast_object", options);
  const int root = job.call.member("src", src);
  at::Tensor payload;
  auto size = job.sizes({0});
  if (job.is_member(root)) {
    payload = job.encode(object);
    size.fill_(payload.numel());
  }
  broadcast(size, src, job.next());
  const auto count = job.checked_size(size.item<int64_t>(), root);
  if (!payload.defined()) payload = job.bytes(count);
  broadcast(payload, src, job.next());
  return job.is_member(root) ? object : job.decode(payload, count, root);
}

std::vector<Object> all_gather_object(const Object& object,
                                      const ObjectOptions& options) {
  const internal::UserFunction function("all_gather_object()");
  const ObjectCall job("all_gather_object", options);
  const auto payload = job.encode(object);
  const auto counts = job.exchange_sizes(payload.numel());
  std::vector<at::Tensor> received;
  for (auto count : counts) received.push_back(job.bytes(count));
  all_gather(received, payload, job.next());
  std::vector<Object> objects;
  for (int member = 0; member < job.size(); ++member) {
    objects.push_back(job.decode(received[member], counts[member], member));
  }
  return objects;
}

std::vector<Object> gather_object(const Object& object, int dst,
                                  const ObjectOptions& options) {
  const internal::UserFunction function("gather_object()");
  const ObjectCall job("gather_object", options);
  const int root = job.call.member("dst", dst);
  const auto payload = job.encode(object);
  const auto counts = job.exchange_sizes(payload.numel());
  // gather() wants one shape, so the objects are padded to the longest.
  const auto longest = *std::max_element(counts.begin(), counts.end());
  auto padded = job.bytes(longest);
  padded.narrow(0, 0, payload.numel()).copy_(payload);
  padded.narrow(0, payload.numel(), longest - payload.numel()).zero_();
  std::vector<at::Tensor> received;
  if (job.is_member(root)) {
    for (int member = 0; member < job.size(); ++member) {
      received.push_back(job.bytes(longest));
    }
  }
  gather(padded, received, dst, job.next());
  std::vector<Object> objects;
  for (size_t member = 0; member < received.size(); ++member) {
    objects.push_back(
        job.decode(received[member], counts[member], static_cast<int>(member)));
  }
  return objects;
}

Object scatter_object(const std::vector<Object>& objects, int src,
                      const ObjectOptions& options) {
  const internal::UserFunction function("scatter_object()");
  const ObjectCall job("scatter_object", options);
  const int root = job.call.member("src", src);
  std::vector<at::Tensor> payloads;
  std::vector<int64_t> counts(job.size());
  if (job.is_member(root)) {
    if (static_cast<int>(objects.size()) != job.size()) {
      throw job.call.mistake(c10::str("objects holds ", objects.size(),
                                      "; give one for each rank (", job.size(),
                                      ")"));
    }
    for (int member = 0; member < job.size(); ++member) {
      payloads.push_back(job.encode(objects[member]));
      counts[member] = payloads.back().numel();
    }
  }
  auto sizes = job.sizes(counts);
  broadcast(sizes, src, job.next());
  auto host = sizes.cpu();
  int64_t longest = 0;
  for (int member = 0; member < job.size(); ++member) {
    counts[member] =
        job.checked_size(host.const_data_ptr<int64_t>()[member], root);
    longest = std::max(longest, counts[member]);
  }
  for (auto& payload : payloads) {
    auto padded = job.bytes(longest);
    padded.narrow(0, 0, payload.numel()).copy_(payload);
    padded.narrow(0, payload.numel(), longest - payload.numel()).zero_();
    payload = padded;
  }
  auto own = job.bytes(longest);
  scatter(own, payloads, src, job.next());
  return job.decode(own, counts[job.call.group->rank()], root);
}

}  // namespace lockstep

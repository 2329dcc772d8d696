#include "lockstep/observe/event.h"

#include <array>
#include <cstddef>

#include "lockstep/observe/proto_message.h"

namespace lockstep::internal {
namespace {

// kTable[k][b]: what byte b, followed by k zero bytes, does to the register.
constexpr size_t kSlices = 8;
constexpr auto kTable = [] {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
  std::array<std::array<uint32_t, 256>, kSlices> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    }
    table[0][byte] = value;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[slice - 1][byte];
      table[slice][byte] = before >> 8 ^ table[0][before & 0xff];
    }
  }
  return table;
}();

uint32_t four_bytes(const char* bytes) {
  uint32_t value = 0;
  for (int at = 3; at >= 0; --at) {
    value = value << 8 | static_cast<unsigned char>(bytes[at]);
  }
  return value;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  // Eight bytes at a time ("slicing"): the lookups do not wait for each other.
  while (bytes.size() >= kSlices) {
    const uint32_t low = crc ^ four_bytes(bytes.data());
    const uint32_t high = four_bytes(bytes.data() + 4);
    crc = kTable[7][low & 0xff] ^ kTable[6][low >> 8 & 0xff] ^
          kTable[5][low >> 16 & 0xff] ^ kTable[4][low >> 24] ^
          kTable[3][high & 0xff] ^ kTable[2][high >> 8 & 0xff] ^
          kTable[1][high >> 16 & 0xff] ^ kTable[0][high >> 24];
    bytes.remove_prefix(kSlices);
  }
  for (const char byte : bytes) {
    crc = crc >> 8 ^ kTable[0][(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~crc;
}

namespace {

// Event.wall_time and Event.step.
ProtoMessage event_at(const EventTime& time) {
  ProtoMessage event;
  event.add_double(1, time.wall_time);
  if (time.step != 0) event.add_integer(2, time.step);
  return event;
}

// An event whose summary has one value (Event.summary, Summary.value).
std::string summary_event(const EventTime& time, const ProtoMessage& value) {
  ProtoMessage summary;
  summary.add_message(1, value);
  ProtoMessage event = event_at(time);
  event.add_message(5, summary);
  return event.bytes();
}

// Summary.Value.tag.
ProtoMessage tagged(std::string_view tag) {
  ProtoMessage value;
  value.add_bytes(1, tag);
  return value;
}

// SummaryMetadata: the plugin of TensorBoard that shows the value, and what the
// value means to it.
ProtoMessage metadata(std::string_view plugin, const ProtoMessage& content) {
  ProtoMessage data;
  data.add_bytes(1, plugin);
  if (!content.bytes().empty()) data.add_message(2, content);
  ProtoMessage result;
  result.add_message(1, data);
  return result;
}

// HParamInfo of plugins/hparams/api.proto.
ProtoMessage hparam_info(std::string_view name, const HParamVariant& value) {
  constexpr int64_t kBool = 2, kFloat64 = 3, kString = 1;  // DataType
  constexpr int64_t kTypes[]{kBool, kFloat64, kString};    // of the variant
  ProtoMessage info;
  info.add_bytes(1, name);
  info.add_integer(4, kTypes[value.index()]);
  return info;
}

// google.protobuf.Value.
ProtoMessage proto_value(const HParamVariant& value) {
  ProtoMessage result;
  if (const auto* number = std::get_if<double>(&value)) {
    result.add_double(2, *number);
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    result.add_bytes(3, *text);
  } else {
    result.add_integer(4, std::get<bool>(value));
  }
  return result;
}

// `data`: HParamsPluginData of plugins/hparams/plugin_data.proto.
std::string hparams_event(const EventTime& time, std::string_view tag,
                          const ProtoMessage& data) {
  ProtoMessage value = tagged(tag);
  value.add_message(9, metadata("hparams", data));
  return summary_event(time, value);
}

std::string fixed(uint64_t value, size_t count) {
  std::string bytes(count, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(value);
    value >>= 8;
  }
  return bytes;
}

// The format rotates each checksum and adds a constant, because a checksum over
// bytes that end with their own checksum is the same for all such bytes.
std::string masked_checksum(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return fixed(static_cast<uint32_t>((crc >> 15 | crc << 17) + 0xa282ead8), 4);
}

}  // namespace

std::string version_event(double wall_time) {
  ProtoMessage event = event_at({wall_time, 0});
  event.add_bytes(3, "brain.Event:2");
  ProtoMessage source;
  source.add_bytes(1, "lockstep::SummaryWriter");
  event.add_message(10, source);  // source_metadata
  return event.bytes();
}

std::string restart_event(const EventTime& time) {
  ProtoMessage log;
  log.add_integer(1, 1);  // SessionLog.status = START
  ProtoMessage event = event_at(time);
  event.add_message(7, log);
  return event.bytes();
}

std::string scalar_event(const EventTime& time, std::string_view tag,
                         double value) {
  ProtoMessage summary = tagged(tag);
  summary.add_float(2, static_cast<float>(value));
  return summary_event(time, summary);
}

std::string histogram_event(const EventTime& time, std::string_view tag,
                            const HistogramData& histogram) {
  ProtoMessage proto;
  proto.add_double(1, histogram.min);
  proto.add_double(2, histogram.max);
  proto.add_double(3, histogram.num);
  proto.add_double(4, histogram.sum);
  proto.add_double(5, histogram.sum_squares);
  proto.add_doubles(6, histogram.limits);
  proto.add_doubles(7, histogram.counts);
  ProtoMessage value = tagged(tag);
  value.add_message(5, proto);
  return summary_event(time, value);
}

std::string text_event(const EventTime& time, std::string_view tag,
                       std::string_view text) {
  ProtoMessage dimension;
  dimension.add_integer(1, 1);
  ProtoMessage shape;
  shape.add_message(2, dimension);
  ProtoMessage tensor;
  tensor.add_integer(1, 7);  // DT_STRING
  tensor.add_message(2, shape);
  tensor.add_bytes(8, text);
  ProtoMessage value = tagged(std::string(tag) + "/text_summary");
  value.add_message(8, tensor);
  value.add_message(9, metadata("text", {}));
  return summary_event(time, value);
}

std::string image_event(const EventTime& time, std::string_view tag,
                        int64_t height, int64_t width, int64_t channels,
                        std::string_view png) {
  ProtoMessage image;
  image.add_integer(1, height);
  image.add_integer(2, width);
  image.add_integer(3, channels);  // the numbers of its colour spaces
  image.add_bytes(4, png);
  ProtoMessage value = tagged(tag);
  value.add_message(4, image);
  return summary_event(time, value);
}

std::vector<std::string> hparams_events(
    const EventTime& time, const HParamValues& hparams,
    const std::vector<std::string>& metrics) {
  ProtoMessage experiment;
  ProtoMessage start;
  for (const auto& [name, value] : hparams) {
    experiment.add_message(4, hparam_info(name, value));
    ProtoMessage entry;
    entry.add_bytes(1, name);
    entry.add_message(2, proto_value(value));
    start.add_message(1, entry);
  }
  for (const std::string& tag : metrics) {
    ProtoMessage name;
    name.add_bytes(2, tag);
    ProtoMessage info;
    info.add_message(1, name);
    experiment.add_message(5, info);
  }
  ProtoMessage end;
  end.add_integer(1, 1);  // STATUS_SUCCESS

  // The `oneof` of HParamsPluginData. Its version is 0.
  ProtoMessage data_of_experiment, data_of_start, data_of_end;
  data_of_experiment.add_message(2, experiment);
  data_of_start.add_message(3, start);
  data_of_end.add_message(4, end);
  return {
      hparams_event(time, "_hparams_/experiment", data_of_experiment),
      hparams_event(time, "_hparams_/session_start_info", data_of_start),
      hparams_event(time, "_hparams_/session_end_info", data_of_end),
  };
}

std::string record_of(std::string_view event) {
  const std::string length = fixed(event.size(), 8);
  std::string record = length + masked_checksum(length);
  record += event;
  record += masked_checksum(event);
  return record;
}

}  // namespace lockstep::internal

#include "lockstep/observe/event.h"

#include "lockstep/observe/crc32c.h"
#include "lockstep/observe/proto_message.h"

namespace lockstep::internal {
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

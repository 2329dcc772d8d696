#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::internal {

// Returns the CRC-32C of the bytes: the polynomial of Castagnoli, as iSCSI has
// it (RFC 3720, sections 12.1 and B.4).
uint32_t crc32c(std::string_view bytes);

}  // namespace lockstep::internal

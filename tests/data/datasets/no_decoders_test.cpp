// Built with the decoders that a build without libjpeg and libpng has.

#include <gtest/gtest.h>

#include "lockstep/data/files/image_decoder.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;

TEST(ImageDecoder, WithoutItsLibrariesSaysWhichOneIsMissing) {
  const auto refusal = [](const char* name) {
    const MappedFile file(
        std::string(LOCKSTEP_SOURCE_DIR "/tests/data/datasets/samples/") +
        name);
    return message_of([&] {
      decode_image("f", file.bytes(), 1000,
                   [](size_t, size_t) -> uint8_t* { return nullptr; });
    });
  };
  EXPECT_EQ(refusal("gray.jpg"),
            "data file \"f\" is a JPEG file, which this build of Lockstep "
            "cannot decode: libjpeg was not found when it was built; install "
            "libjpeg (Debian: libjpeg-dev) and build Lockstep again");
  EXPECT_EQ(refusal("gray.png"),
            "data file \"f\" is a PNG file, which this build of Lockstep "
            "cannot decode: libpng was not found when it was built; install "
            "libpng (Debian: libpng-dev) and build Lockstep again");
}

}  // namespace
}  // namespace lockstep::internal

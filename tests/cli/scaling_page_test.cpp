// The page of `lockstep report scaling` in a real browser: nothing is cut off
// or wider than the window, and the browser complains about nothing.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Says in the document what is wrong with it.
constexpr const char* kCheck = R"(<script>
const wrong = [];
const root = document.documentElement;
if (root.scrollWidth > root.clientWidth) wrong.push('wider than the window');
const pictures = document.querySelectorAll('svg');
for (const svg of pictures) {
  const frame = svg.getBoundingClientRect();
  if (frame.width < 300) wrong.push('a picture is small');
  for (const part of svg.querySelectorAll('text, circle, polyline')) {
    const box = part.getBoundingClientRect();
    if (box.left < frame.left || box.right > frame.right ||
        box.top < frame.top || box.bottom > frame.bottom) {
      wrong.push('cut off: ' + part.textContent);
    }
  }
  const texts = [...svg.querySelectorAll('text')];
  texts.forEach((one, i) => texts.slice(i + 1).forEach(other => {
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    if (a.left < b.right && b.left < a.right && a.top < b.bottom &&
        b.top < a.bottom) {
      wrong.push('overlap: ' + one.textContent + ', ' + other.textContent);
    }
  }));
}
document.body.innerHTML = '';
document.title = pictures.length + ' pictures, wrong: [' + wrong + ']';
</script>)";

class ScalingPage : public LauncherTest {};

TEST_F(ScalingPage, FitsIntoAWindowOfABrowser) {
  ASSERT_TRUE(fs::exists("/usr/bin/chromium"))
      << "./dev test browser installs chromium";
  const fs::path program = scratch() / "train";
  std::ofstream(program)
      << "#!/bin/sh\necho $((WORLD_SIZE * 123456)) samples/s\n";
  fs::permissions(program, fs::perms::owner_all);
  const fs::path page = scratch() / "scaling.html";
  const auto made = run_command(
      {"report", "scaling", "--nproc=2,4,16", "--rounds=1", "--html",
       page.string(), "--compare", "echo {nproc} samples/s {batch:16}", "--",
       program.string(), "{batch:16}"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  std::ofstream(page, std::ios::app) << kCheck;
  for (const char* width : {"1200", "500"}) {
    const auto shown = run_program(
        {"/usr/bin/env", "TMPDIR=" + scratch().string(), "/usr/bin/chromium",
         "--headless", "--no-sandbox", "--disable-gpu",
         "--user-data-dir=" + (scratch() / "profile").string(),
         "--window-size=" + std::string(width) + ",2000", "--dump-dom",
         "file://" + page.string()},
        {}, std::chrono::seconds(60));
    EXPECT_EQ(shown.exit_code, 0) << shown.err;
    EXPECT_THAT(shown.out, HasSubstr("<title>2 pictures, wrong: []</title>"))
        << width;
  }
}

}  // namespace
}  // namespace lockstep::internal::testing

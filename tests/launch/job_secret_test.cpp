#include "lockstep/launch/nodes/job_secret.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>

#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class JobSecretTest : public ::testing::Test {
 protected:
  JobSecretTest() { unsetenv(kJobSecretVariable); }
  ~JobSecretTest() override { unsetenv(kJobSecretVariable); }

  std::string file(const std::string& text, mode_t mode) {
    const std::string path = folder_.file("secret");
    std::filesystem::remove(path);
    write_file(path, text);
    chmod(path.c_str(), mode);
    return path;
  }

  TemporaryFolder folder_;
};

TEST_F(JobSecretTest, ComesFromTheFileElseFromTheEnvironment) {
  EXPECT_EQ(job_secret(""), std::nullopt);
  setenv(kJobSecretVariable, "sixteen letters.", 1);
  EXPECT_EQ(job_secret(""), "sixteen letters.");
  EXPECT_EQ(job_secret(file("another secret, this\nsecond line\n", 0600)),
            "another secret, this");
  EXPECT_EQ(job_secret(file("another secret, this", 0400)),
            "another secret, this");
}

// A bug: nodes whose variable came from a file with a final newline were
// refused by the others, as they had another secret.
TEST_F(JobSecretTest, HasNoNewlineAtItsEnd) {
  for (const char* end : {"\n", "\r\n"}) {
    const std::string text = std::string("sixteen letters.") + end;
    setenv(kJobSecretVariable, text.c_str(), 1);
    EXPECT_EQ(job_secret(""), "sixteen letters.");
    EXPECT_EQ(job_secret(file(text, 0600)), "sixteen letters.");
  }
}

TEST_F(JobSecretTest, FileThatOthersMayReadIsRefused) {
  for (const mode_t mode : {0644, 0640, 0604, 0620}) {
    EXPECT_THAT(message_of([&] { job_secret(file("sixteen letters.", mode)); }),
                AllOf(HasSubstr("chmod 600"), HasSubstr("/secret"),
                      Not(HasSubstr("sixteen"))));
  }
}

TEST_F(JobSecretTest, EachMistakeIsNamedWithoutTheSecret) {
  EXPECT_THAT(message_of([] { job_secret("/no/such/file"); }),
              AllOf(HasSubstr("/no/such/file"), HasSubstr("No such file")));
  EXPECT_THAT(message_of([] { job_secret("/"); }), HasSubstr("not a file"));
  for (const auto& text : {std::string("too short"), std::string(1025, 'x'),
                           std::string("\nsecond line of the file")}) {
    EXPECT_THAT(message_of([&] { job_secret(file(text, 0600)); }),
                AllOf(HasSubstr("from 16 to 1024"), Not(HasSubstr("short")),
                      Not(HasSubstr("xx"))));
  }
  setenv(kJobSecretVariable, "short", 1);
  EXPECT_THAT(message_of([] { job_secret(""); }),
              AllOf(HasSubstr("LOCKSTEP_JOB_SECRET has 5 characters"),
                    HasSubstr("/dev/urandom")));
}

}  // namespace
}  // namespace lockstep::internal::testing

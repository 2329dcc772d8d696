#pragma once

#include <optional>
#include <string>

namespace lockstep::internal {

// The environment variable that holds the secret of a job.
inline constexpr const char* kJobSecretVariable = "LOCKSTEP_JOB_SECRET";

// Returns the secret by which the agents of a job know each other: the first
// line of `file` if that is not empty, otherwise the environment variable
// LOCKSTEP_JOB_SECRET; nothing if there is neither. It has from 16 to 1024
// characters. Throws std::invalid_argument, without the secret, if it has not,
// if the file cannot be read, or if others than its owner may read it.
std::optional<std::string> job_secret(const std::string& file);

// Returns the token with which other hosts may read the metrics of a job: the
// SHA-256 of "lockstep metrics " and the job's secret, as 64 hexadecimal
// digits. Prometheus sends it in the clear, and it does not give away the
// secret. Throws std::runtime_error if the module that links OpenSSL cannot be
// loaded.
std::string metrics_token(const std::string& secret);

// The function of the module by which metrics_token() does it.
using DeriveMetricsToken = void (*)(const std::string& secret,
                                    std::string& token);
inline constexpr const char* kDeriveMetricsToken =
    "lockstep_derive_metrics_token";

}  // namespace lockstep::internal

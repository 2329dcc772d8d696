#pragma once

#include <string>

namespace lockstep::internal {

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

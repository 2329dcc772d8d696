#pragma once

// Includes all metrics.
#include "lockstep/metrics/accuracy.h"
#include "lockstep/metrics/confusion_matrix.h"
#include "lockstep/metrics/mean.h"
#include "lockstep/metrics/metric.h"
#include "lockstep/metrics/perplexity.h"
#include "lockstep/metrics/sum.h"

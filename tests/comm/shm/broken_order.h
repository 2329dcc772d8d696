// Included first in a copy of the protocol that is wrong on purpose: its
// acquire loads do not acquire. ThreadSanitizer must complain about it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#define memory_order_acquire memory_order_relaxed

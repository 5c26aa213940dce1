#pragma once
#include <chrono>
#include <fstream>

using namespace std::chrono_literals;

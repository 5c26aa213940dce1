#pragma once
// Every type that travels without help from its user.
#include <torchspan/detail/wire/errors.h>
#include <torchspan/wire/containers.h>
#include <torchspan/wire/torch_types.h>

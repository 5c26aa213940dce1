#if defined(__SANITIZE_THREAD__)
// The counts inside std::exception_ptr are atomic, but in libstdc++.so, which ThreadSanitizer does not see.
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif

"""SGLang with kt-kernel behind `kt serve --engine sglang-kt`: its command line from a plan, and its process."""

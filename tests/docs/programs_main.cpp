// All programs of the documentation in one (generated programs.cpp). A symbolic
// link to this program has the name of the one that it runs.

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

// Returns -1 if there is no program of that name.
int run_program(const std::string& name, int argc, char** argv);

int main(int argc, char** argv) {
  // ./train -> guide_2 -> docs_programs: the last link has the program's name.
  namespace fs = std::filesystem;
  fs::path path = argv[0];
  while (fs::is_symlink(path) &&
         fs::is_symlink(path.parent_path() / fs::read_symlink(path))) {
    path = path.parent_path() / fs::read_symlink(path);
  }
  const std::string name = path.filename();
  const int result = run_program(name, argc, argv);
  if (result == -1) std::fprintf(stderr, "no program \"%s\"\n", name.c_str());
  return result;
}

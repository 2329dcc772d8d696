// A plugin for GCC: `#pragma lockstep instantiate_templates` instantiates at
// once all templates that the source has used so far. Without it GCC waits for
// the end of the source, and does nothing of it for a precompiled header: every
// source that reads the header does the work again. (Clang does it for
// precompiled headers with -fpch-instantiate-templates.) GCC Internals,
// "Plugins".
#include <gcc-plugin.h>

// gcc-plugin.h must come before the others.
#include <plugin-version.h>
#include <tree.h>

#include <c-family/c-pragma.h>
#include <cp/cp-tree.h>

// GCC loads only plugins that declare a licence that fits the GPL.
int plugin_is_GPL_compatible;

namespace {

void use_virtual_functions(tree class_type) {
  tree each = BINFO_VIRTUALS(TYPE_BINFO(class_type));
  for (; each != NULL_TREE; each = TREE_CHAIN(each)) {
    tree function = BV_FN(each);
    if (DECL_PURE_VIRTUAL_P(function) || DECL_DELETED_FN(function)) continue;
    mark_used(function);
  }
}

// GCC adds the tables of virtual functions to a source at its end, and these
// use functions of templates, too.
void instantiate(cpp_reader* /*reader*/) {
  instantiate_pending_templates(/*retries=*/0);
  unsigned done = 0;
  while (done != vec_safe_length(keyed_classes)) {
    const unsigned known = vec_safe_length(keyed_classes);
    for (; done != known; ++done) use_virtual_functions((*keyed_classes)[done]);
    instantiate_pending_templates(/*retries=*/0);
  }
}

void register_pragma(void* /*event_data*/, void* /*user_data*/) {
  c_register_pragma("lockstep", "instantiate_templates", instantiate);
}

}  // namespace

// GCC calls this when it loads the plugin; a result other than 0 is an error.
int plugin_init(plugin_name_args* plugin, plugin_gcc_version* version) {
  if (!plugin_default_version_check(version, &gcc_version)) return 1;
  register_callback(plugin->base_name, PLUGIN_PRAGMAS, register_pragma,
                    nullptr);
  return 0;
}

// The last line of a precompiled header that is compiled with the plugin
// instantiate_templates.cpp. No include guard: the pragma concerns what was
// included before.
#pragma lockstep instantiate_templates

# Turns the comments of a header into those that Doxygen reads.

# "int x;  // what x is" is a comment on what stands before it.
s|^([^/"]*[^/" ][^/"]*[;,{]) +// (.*)$|\1 ///< \2|

/^ *\/\// {
  # Headings of groups of options are not documentation.
  /^ *\/\/ -----* /d
  # Examples are indented by three; Doxygen's blocks of code by four.
  s|^( *)//   (.*)$|\1///     \2|
  t
  s|^( *)//|\1///|
  s|<|\&lt;|g
}

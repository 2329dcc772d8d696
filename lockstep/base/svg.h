#pragma once

#include <array>
#include <string>
#include <vector>

namespace lockstep::internal {

// Colours of lines in one picture, which colour-blind readers can tell apart
// too (Okabe and Ito, "Color Universal Design", 2008).
inline constexpr std::array<const char*, 7> kSvgColours{
    "#000000", "#0072b2", "#56b4e9", "#009e73",
    "#d55e00", "#cc79a7", "#e69f00"};

// A picture in SVG 1.1, a whole file that any browser shows. An element covers
// those that were drawn before it. Places are in pixels from the upper left
// corner; a colour is "#rrggbb". Any UTF-8 text may be given; it is escaped.
class SvgPicture {
 public:
  struct Point {
    double x = 0;
    double y = 0;
  };
  // Which part of a text lies at its place.
  enum class Anchor { start, middle, end };

  // A white picture.
  SvgPicture(double width, double height);

  void text(Point at, Anchor anchor, const std::string& text,
            bool bold = false);
  // Text in pixels of another height than 12, with its middle at the place.
  void small_text(Point middle, double size, const std::string& text);
  // Text that is read from bottom to top, with its middle at the place.
  void upward_text(Point middle, const std::string& text);
  enum class Stroke { solid, dashed };
  void line(Point from, Point to, const char* colour,
            Stroke stroke = Stroke::solid);
  // `id` names the line in the file and must be unique there.
  void polyline(const std::string& id, const std::vector<Point>& points,
                const char* colour, Stroke stroke = Stroke::solid);
  void dot(Point middle, const char* colour);
  // A filled rectangle with a thin dark edge.
  void box(Point upper_left, double width, double height, const char* colour);
  // All that is drawn until end_group() is one group; a browser shows `title`
  // over it.
  void begin_group(const std::string& title);
  void end_group();

  // Returns the file.
  std::string file() const;

 private:
  std::string svg_;
};

}  // namespace lockstep::internal

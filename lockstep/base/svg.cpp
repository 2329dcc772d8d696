#include "lockstep/base/svg.h"

#include <cstdio>

namespace lockstep::internal {
namespace {

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

const char* name_of(SvgPicture::Anchor anchor) {
  switch (anchor) {
    case SvgPicture::Anchor::start:
      return "start";
    case SvgPicture::Anchor::middle:
      return "middle";
    case SvgPicture::Anchor::end:
      return "end";
  }
  return "start";
}

const char* dashes_of(SvgPicture::Stroke stroke) {
  return stroke == SvgPicture::Stroke::dashed ? " stroke-dasharray=\"6 4\""
                                              : "";
}

}  // namespace

SvgPicture::SvgPicture(double width, double height)
    : svg_(format("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" "
                  "width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
                  "font-family=\"sans-serif\" font-size=\"12\">\n"
                  "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
                  width, height, width, height)) {}

void SvgPicture::text(Point at, Anchor anchor, const std::string& text,
                      bool bold) {
  svg_ += format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", at.x,
                 at.y, name_of(anchor), bold ? " font-weight=\"bold\"" : "") +
          escaped(text) + "</text>\n";
}

void SvgPicture::upward_text(Point middle, const std::string& text) {
  svg_ += format(
              "<text transform=\"translate(%.1f %.1f) rotate(-90)\" "
              "text-anchor=\"middle\">",
              middle.x, middle.y) +
          escaped(text) + "</text>\n";
}

void SvgPicture::small_text(Point middle, double size,
                            const std::string& text) {
  svg_ += format(
              "<text x=\"%.1f\" y=\"%.1f\" font-size=\"%.1f\" "
              "text-anchor=\"middle\">",
              middle.x, middle.y + size / 3, size) +
          escaped(text) + "</text>\n";
}

void SvgPicture::line(Point from, Point to, const char* colour, Stroke stroke) {
  svg_ += format(
      "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" "
      "stroke=\"%s\"%s/>\n",
      from.x, from.y, to.x, to.y, colour, dashes_of(stroke));
}

void SvgPicture::polyline(const std::string& id,
                          const std::vector<Point>& points, const char* colour,
                          Stroke stroke) {
  svg_ += "<polyline id=\"" + escaped(id) +
          format(
              "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s "
              "points=\"",
              colour, dashes_of(stroke));
  for (const Point& point : points) {
    svg_ += format("%.1f,%.1f ", point.x, point.y);
  }
  svg_ += "\"/>\n";
}

void SvgPicture::dot(Point middle, const char* colour) {
  svg_ += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                 middle.x, middle.y, colour);
}

void SvgPicture::box(Point upper_left, double width, double height,
                     const char* colour) {
  svg_ += format(
      "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
      "fill=\"%s\" stroke=\"#444444\" stroke-width=\"0.5\"/>\n",
      upper_left.x, upper_left.y, width, height, colour);
}

void SvgPicture::begin_group(const std::string& title) {
  svg_ += "<g>\n<title>" + escaped(title) + "</title>\n";
}

void SvgPicture::end_group() { svg_ += "</g>\n"; }

std::string SvgPicture::file() const { return svg_ + "</svg>\n"; }

}  // namespace lockstep::internal

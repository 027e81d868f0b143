//! The plots: figures against their budgets, the tail of writes, exports.
//!
//! Invariants: the colours have enough contrast on light and on dark pages, and the background is transparent. A group that was
//! not measured has no plot.

use super::{number, peers};
use crate::budgets::{BUDGETS, Bound};
use plotters::coord::Shift;
use plotters::prelude::*;
use serde_json::Value;
use std::ops::Range;

const TEXT: RGBColor = RGBColor(125, 125, 125);
const GOOD: RGBColor = RGBColor(58, 134, 200);
const BAD: RGBColor = RGBColor(217, 120, 50);
const WIDTH: u32 = 820;

/// A plot.
pub struct Plot {
    /// Its file.
    pub file: &'static str,
    /// Its title.
    pub title: &'static str,
    /// The drawing.
    pub svg: String,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// All plots for which figures exist.
///
/// # Errors
/// When a plot cannot be drawn, as text.
pub fn all(figures: &Value) -> Result<Vec<Plot>, String> {
    let mut plots = Vec::new();
    let ratios = ratios(figures);
    if !ratios.is_empty() {
        let title = "How much of its budget each figure takes: what ends left of the line meets it";
        plots.push(plot("ratios.svg", title, 22 * ratios.len() as u32 + 70, |area| {
            draw_ratios(area, &ratios)
        })?);
    }
    if let Some(tail) = Tail::of(figures) {
        let title = "4 KiB writes while writeback and reclaim run, and bare copies in turns: microseconds at percentiles";
        plots.push(plot("tail.svg", title, 360, |area| tail.draw(area))?);
    }
    let exports = exports(figures);
    if !exports.is_empty() {
        let title = "4 KiB writes through exports, median in microseconds: over CBD, and over a bare copy";
        plots.push(plot("exports.svg", title, 22 * 2 * exports.len() as u32 + 70, |area| {
            draw_exports(area, &exports)
        })?);
    }
    Ok(plots)
}

/// The plots of the peers' part.
///
/// # Errors
/// When a plot cannot be drawn, as text.
pub fn peers(figures: &Value) -> Result<Vec<Plot>, String> {
    let mut bars = Vec::new();
    for (job, group) in
        [("write_1", "depth 1: "), ("write_32", "depth 32: "), ("full_32", "full, depth 32: ")]
    {
        for (number, (name, title, value)) in peers::figures_of(figures, job).into_iter().enumerate() {
            let before = if number == 0 { group } else { "" };
            let colour = if name.starts_with("cbd") { GOOD } else { TEXT };
            bars.push(Bar {
                name: format!("{before}{title}"),
                value,
                label: peers::thousands(value),
                colour,
            });
        }
    }
    if bars.is_empty() {
        return Ok(Vec::new());
    }
    let title = "Instructions for a write of 4 KiB: CBD and the kernel's own caches";
    let drawn = plot("peers.svg", title, 22 * bars.len() as u32 + 70, |area| {
        draw_bars(area, "4 KiB write, instructions with all that fio and the kernel do", &bars, None)
    });
    Ok(vec![drawn?])
}

fn plot(
    file: &'static str,
    title: &'static str,
    height: u32,
    draw: impl FnOnce(&Area<'_>) -> Drawn,
) -> Result<Plot, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        draw(&area)
            .and_then(|()| Ok(area.present()?))
            .map_err(|error| format!("cannot draw {file}: {error}"))?;
    }
    Ok(Plot { file, title, svg })
}

fn text() -> TextStyle<'static> {
    ("sans-serif", 16).into_font().color(&TEXT)
}

/// Each figure as a share of its budget.
fn ratios(figures: &Value) -> Vec<(&'static str, f64)> {
    let share = |bound: Bound, value: f64| match bound {
        Bound::AtMost(limit) => Some(value / limit),
        Bound::AtLeast(limit) => Some(limit / value),
        Bound::Reported => None,
    };
    let all = BUDGETS
        .iter()
        .filter_map(|budget| Some((budget.path, share(budget.bound, number(figures, budget.path)?)?)));
    all.filter(|(_, share)| share.is_finite()).collect()
}

/// A line of a plot of horizontal bars: its name, its value, and the label of the value.
struct Bar {
    name: String,
    value: f64,
    label: String,
    colour: RGBColor,
}

/// Bars from top to bottom.
fn draw_bars(area: &Area<'_>, title: &str, bars: &[Bar], line: Option<f64>) -> Drawn {
    let longest = bars.iter().map(|bar| bar.value).chain(line).fold(0.0, f64::max);
    let last = bars.len() as i32 - 1;
    let mut chart = ChartBuilder::on(area)
        .caption(title, text())
        .margin(8)
        .y_label_area_size(240)
        .x_label_area_size(24)
        .build_cartesian_2d(0.0..longest * 1.12, (0..last).into_segmented())?;
    let name = |place: &SegmentValue<i32>| match place {
        SegmentValue::CenterOf(place) => {
            let number = usize::try_from(last - place).unwrap_or(usize::MAX);
            bars.get(number).map(|bar| bar.name.clone()).unwrap_or_default()
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .axis_style(TEXT)
        .label_style(text())
        .x_labels(8)
        .y_labels(bars.len())
        .y_label_formatter(&name)
        .draw()?;
    chart.draw_series(bars.iter().zip(0..).map(|(bar, number)| {
        let place = last - number;
        let corners = [(0.0, SegmentValue::Exact(place)), (bar.value, SegmentValue::Exact(place + 1))];
        let mut rectangle = Rectangle::new(corners, bar.colour.filled());
        rectangle.set_margin(4, 4, 0, 0);
        rectangle
    }))?;
    chart.draw_series(bars.iter().zip(0..).map(|(bar, number)| {
        // The label is not placed over the line, where it would be hard to read.
        let beside = line.filter(|line| (line * 0.85..*line).contains(&bar.value)).unwrap_or(bar.value);
        let place = (beside, SegmentValue::CenterOf(last - number));
        EmptyElement::at(place) + Text::new(bar.label.clone(), (4, -6), text())
    }))?;
    if let Some(line) = line {
        let ends = [(line, SegmentValue::Exact(0)), (line, SegmentValue::Exact(last + 1))];
        chart.draw_series([PathElement::new(ends, TEXT.stroke_width(2))])?;
    }
    Ok(())
}

fn draw_ratios(area: &Area<'_>, ratios: &[(&'static str, f64)]) -> Drawn {
    let bars: Vec<_> = ratios
        .iter()
        .map(|&(path, share)| Bar {
            name: path.to_owned(),
            value: share,
            label: format!("{share:.2}"),
            colour: if share <= 1.0 { GOOD } else { BAD },
        })
        .collect();
    draw_bars(area, "share of the budget (left of the line: met)", &bars, Some(1.0))
}

/// Exports with the medians of both sides, in microseconds.
fn exports(figures: &Value) -> Vec<(String, f64, f64)> {
    let Some(Value::Object(all)) = figures.get("export") else { return Vec::new() };
    let mut found = Vec::new();
    for depth in [1, 16] {
        for (name, export) in all {
            let us = |side: &str| export.get(format!("qd{depth}_{side}p50_us"))?.as_f64();
            if let (Some(cached), Some(bare)) = (us(""), us("copy_")) {
                found.push((format!("{name}, depth {depth}"), cached, bare));
            }
        }
    }
    found
}

fn draw_exports(area: &Area<'_>, exports: &[(String, f64, f64)]) -> Drawn {
    let bar = |name: String, value: f64, colour| Bar { name, value, label: format!("{value:.1}"), colour };
    let bars: Vec<_> = exports
        .iter()
        .flat_map(|(name, cached, bare)| {
            [bar(format!("{name}: CBD"), *cached, GOOD), bar("bare copy".to_owned(), *bare, TEXT)]
        })
        .collect();
    draw_bars(area, "4 KiB write, median, microseconds", &bars, None)
}

/// A number with about three digits.
fn three_digits(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// The tail of writes and of copies.
struct Tail {
    percentiles: Vec<String>,
    writes: Vec<f64>,
    copies: Vec<f64>,
}

impl Tail {
    fn of(figures: &Value) -> Option<Self> {
        let numbers = |name: &str| -> Option<Vec<f64>> {
            figures.get("tail")?.get(name)?.as_array()?.iter().map(Value::as_f64).collect()
        };
        let name = |share: f64| if share >= 100.0 { "max".to_owned() } else { format!("p{share}") };
        let percentiles: Vec<_> = numbers("percentiles")?.into_iter().map(name).collect();
        let (writes, copies) = (numbers("write_4k_us")?, numbers("copy_4k_us")?);
        let is_whole = percentiles.len() > 1
            && writes.len() == percentiles.len()
            && copies.len() == percentiles.len()
            && writes.iter().chain(&copies).all(|&one| one > 0.0);
        is_whole.then_some(Self { percentiles, writes, copies })
    }

    /// The powers of ten around all values.
    fn range(&self) -> Range<f64> {
        let all = || self.writes.iter().chain(&self.copies).copied();
        let power = |of: f64| 10_f64.powf(of);
        let low = power(all().fold(f64::INFINITY, f64::min).log10().floor());
        low..power(all().fold(0.0, f64::max).log10().ceil()).max(10.0 * low)
    }

    fn draw(&self, area: &Area<'_>) -> Drawn {
        let last = self.percentiles.len() as i32 - 1;
        let mut chart = ChartBuilder::on(area)
            .caption("4 KiB durable write beside writeback and reclaim, microseconds", text())
            .margin(8)
            .margin_right(48)
            .y_label_area_size(60)
            .x_label_area_size(28)
            .build_cartesian_2d(0..last, self.range().log_scale())?;
        let name = |place: &i32| {
            usize::try_from(*place)
                .ok()
                .and_then(|place| self.percentiles.get(place).cloned())
                .unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(TEXT.mix(0.3))
            .axis_style(TEXT)
            .label_style(text())
            .x_labels(self.percentiles.len())
            .x_label_formatter(&name)
            .draw()?;
        for (label, values, colour) in [("CBD", &self.writes, GOOD), ("bare copy", &self.copies, TEXT)] {
            let points = || (0..).zip(values.iter().copied());
            chart
                .draw_series(LineSeries::new(points(), colour.stroke_width(2)))?
                .label(label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            chart.draw_series(points().map(|(place, value)| {
                EmptyElement::at((place, value))
                    + Circle::new((0, 0), 3, colour.filled())
                    + Text::new(three_digits(value), (-12, if colour == GOOD { -18 } else { 6 }), text())
            }))?;
        }
        chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).label_font(text()).draw()?;
        Ok(())
    }
}

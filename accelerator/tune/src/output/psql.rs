//! Tables as Python's `tabulate` draws its format `psql`: text to the left, numbers by their decimal points.

use serde_json::Value;

use crate::number::{format_g, repr, repr_float};

/// The content of a table's cell.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Missing,
    Boolean(bool),
    Integer(i128),
    Float(f64),
    Text(String),
}

impl Cell {
    /// Text on one line, without what a terminal would obey.
    pub(super) fn text(text: &str) -> Self {
        let plain = |character: char| match character.is_control() {
            true => ' ',
            false => character,
        };
        Self::Text(text.trim().chars().map(plain).collect())
    }

    /// A measured number. Counts are shown in full.
    pub(super) fn number(value: f64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "it is below 2^53")]
        match value.fract() == 0.0 && value.abs() < LARGEST_COUNT {
            true => Self::Integer(value as i128),
            false => Self::Float(value),
        }
    }

    /// A parameter. As Ray has it, of long texts the end is shown.
    pub(super) fn value(value: Option<&Value>) -> Self {
        let text = match value {
            None | Some(Value::Null) => return Self::Missing,
            Some(Value::Bool(value)) => return Self::Boolean(*value),
            Some(Value::Number(number)) => {
                let integer = number.as_i64().map(i128::from);
                let integer = integer.or_else(|| number.as_u64().map(i128::from));
                let float = || Self::Float(number.as_f64().unwrap_or(f64::NAN));
                return integer.map_or_else(float, Self::Integer);
            }
            Some(Value::String(text)) => text.clone(),
            Some(other) => repr(other),
        };
        let length = text.chars().count();
        match length > LONGEST_VALUE {
            true => {
                let end: String = text.chars().skip(length + 3 - LONGEST_VALUE).collect();
                Self::text(&format!("...{end}"))
            }
            false => Self::text(&text),
        }
    }

    fn kind(&self) -> CellKind {
        match self {
            Self::Missing => CellKind::Nothing,
            Self::Boolean(_) => CellKind::Boolean,
            Self::Integer(_) => CellKind::Integer,
            Self::Float(_) => CellKind::Float,
            Self::Text(_) => CellKind::Text,
        }
    }

    /// Writes it as its column has it.
    fn shown(&self, column: CellKind) -> String {
        #[expect(clippy::cast_precision_loss, reason = "six digits are shown")]
        match (self, column) {
            (Self::Missing, _) => String::new(),
            (Self::Text(text), _) => text.clone(),
            (Self::Boolean(value), CellKind::Float) => u8::from(*value).to_string(),
            (Self::Boolean(value), _) => repr(&(*value).into()),
            (Self::Integer(value), CellKind::Float) => format_g(*value as f64),
            (Self::Integer(value), _) => value.to_string(),
            (Self::Float(value), CellKind::Text) => repr_float(*value),
            (Self::Float(value), _) => format_g(*value),
        }
    }
}

/// The alignment of a column's cells.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Align {
    /// Depends on the content of the column.
    Auto,
    Right,
}

/// The table, without a line break at its end. Each row has a cell for every header.
pub(super) fn psql(headers: &[(String, Align)], rows: &[Vec<Cell>]) -> String {
    let columns: Vec<_> = headers
        .iter()
        .enumerate()
        .map(|(index, (header, align))| {
            let cells: Vec<_> = rows.iter().map(|row| &row[index]).collect();
            column(header, *align, &cells)
        })
        .collect();
    let rule = |cross: &str| {
        let widths = columns
            .iter()
            .map(|lines| "-".repeat(lines[0].chars().count() + 2));
        widths.collect::<Vec<_>>().join(cross)
    };
    let line = |index: usize| {
        let cells: Vec<_> = columns.iter().map(|lines| lines[index].as_str()).collect();
        format!("| {} |", cells.join(" | "))
    };
    let mut lines = vec![
        format!("+{}+", rule("+")),
        line(0),
        format!("|{}|", rule("+")),
    ];
    lines.extend((1..=rows.len()).map(line));
    lines.push(format!("+{}+", rule("+")));
    lines.join("\n")
}

/// Kinds of cells. A column is of its last one.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum CellKind {
    Nothing,
    Boolean,
    Integer,
    Float,
    Text,
}

/// The first count that is not shown in full.
const LARGEST_COUNT: f64 = 9_007_199_254_740_992.0;
/// Ray's bound.
const LONGEST_VALUE: usize = 20;

/// The header and the cells of a column, all as wide as the widest.
fn column(header: &str, align: Align, cells: &[&Cell]) -> Vec<String> {
    let kinds = cells.iter().map(|cell| cell.kind());
    let kind = kinds.max().unwrap_or(CellKind::Nothing);
    let is_numeric = matches!(kind, CellKind::Integer | CellKind::Float);
    let width = |text: &str| text.chars().count();
    let mut texts: Vec<_> = cells.iter().map(|cell| cell.shown(kind)).collect();
    if is_numeric && align == Align::Auto {
        let most = texts.iter().filter_map(|text| after_point(text)).max();
        for text in &mut texts {
            // A number without a point ends before the point of the others.
            let missing = most.map_or(0, |most| match after_point(text) {
                Some(after) => most - after,
                None => most + 1,
            });
            text.push_str(&" ".repeat(missing));
        }
    }
    let widest = texts.iter().map(|text| width(text)).max();
    let widest = widest.unwrap_or(0).max(width(header) + 2);
    let texts = std::iter::once(header.to_owned()).chain(texts);
    let padded = texts.map(|text| match is_numeric || align == Align::Right {
        true => format!("{text:>widest$}"),
        false => format!("{text:<widest$}"),
    });
    padded.collect()
}

/// Returns the number of characters after the decimal point, or after the exponent's letter if there is no point.
fn after_point(text: &str) -> Option<usize> {
    let point = text.rfind('.').or_else(|| text.rfind('e'))?;
    Some(text.len() - point - 1)
}

//! Text for people: tables, and printing.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use crate::error::{Error, Result};

/// Prints `text`; that nobody reads on is no error.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn print(text: &str) -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::system("standard output cannot be written").with_source(error))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Aligns `rows` in columns, two blanks apart.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [
            ["a".to_owned(), "b".to_owned()],
            ["long".to_owned(), "c".to_owned()],
        ];
        assert_eq!(columns(&rows), "a     b\nlong  c\n");
    }
}

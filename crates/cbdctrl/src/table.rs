//! Tables and pages for a terminal.
//!
//! Invariants: no text is truncated. A line that does not fit is wrapped at a space, and a word longer than a line,
//! such as a path, is not broken, so that it can be copied.

/// The least width of a wrapped column; if there is less space, the column is printed below its row.
const COLUMN_MIN: usize = 24;
/// Indent of a column below its row.
const INDENT_BELOW: usize = 4;
/// The width of a terminal that does not report its own.
const DEFAULT_WIDTH: u16 = 80;

/// Columns of the terminal on standard output; none if it is no terminal.
pub fn terminal_width() -> Option<usize> {
    use std::io::IsTerminal;
    let stdout = std::io::stdout();
    stdout.is_terminal().then(|| {
        let size = terminal_size::terminal_size_of(&stdout);
        usize::from(size.map_or(DEFAULT_WIDTH, |(width, _)| width.0).max(20))
    })
}

/// The words of `text` in lines of `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The page, wrapped to the terminal's width if standard output is a terminal.
pub fn fit(page: &str) -> String {
    terminal_width().map_or_else(|| page.to_owned(), |width| wrap_page(page, width))
}

/// The page with lines of at most `width` characters; wrapped text continues below the column where it began.
pub fn wrap_page(page: &str, width: usize) -> String {
    let mut text = String::new();
    for line in page.lines() {
        if line.chars().count() <= width {
            text.push_str(line);
            text.push('\n');
            continue;
        }
        // A line is a name, spaces and text; or a sentence.
        let indent = line.len() - line.trim_start().len();
        let name = line[indent..].find("  ").map(|at| indent + at);
        let column = name.map(|at| at + line[at..].len() - line[at..].trim_start().len());
        let column = column.filter(|&column| column + COLUMN_MIN <= width).unwrap_or(indent + INDENT_BELOW);
        let (head, rest) = match name {
            Some(_) if line.is_char_boundary(column) && column <= line.len() => line.split_at(column),
            _ => line.split_at(indent),
        };
        for (number, part) in wrapped(rest, width.saturating_sub(column)).into_iter().enumerate() {
            let before = if number == 0 { head.to_owned() } else { " ".repeat(column) };
            text.push_str(format!("{before}{part}").trim_end());
            text.push('\n');
        }
    }
    text
}

/// Columns under their heads, as wide as their widest cell.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with `heads`.
    pub fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(|&head| head.to_owned()).collect()] }
    }

    /// Adds a row with one cell for each head.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text of at most `width` columns; the last column is wrapped to fit.
    pub fn render(&self, width: usize) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widest = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns.saturating_sub(1)).map(widest).collect();
        let column: usize = widths.iter().map(|width| width + 2).sum();
        let fits = column + COLUMN_MIN <= width;
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  ")).collect();
            let mut line = cells.concat();
            let last = row.get(widths.len()).map_or("", String::as_str);
            let (mut indent, mut lines) = (column, wrapped(last, width.saturating_sub(column)));
            let is_wider = |text: &str| column + text.chars().count() > width;
            if (!fits && is_wider(last)) || lines.iter().any(|line| is_wider(line)) {
                (indent, lines) = (INDENT_BELOW, wrapped(last, width.saturating_sub(INDENT_BELOW)));
                lines.insert(0, String::new());
            }
            for (number, part) in lines.into_iter().enumerate() {
                if number > 0 {
                    line = " ".repeat(indent);
                }
                line.push_str(&part);
                text.push_str(line.trim_end());
                text.push('\n');
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["ID", "PATH", "ALIVE"]);
        table.row(vec!["0".into(), "/dev/sdb".into(), "yes".into()]);
        assert_eq!(table.render(80), "ID  PATH      ALIVE\n0   /dev/sdb  yes\n");
    }

    #[test]
    fn a_last_column_that_is_too_long_is_wrapped_below_its_head() {
        let mut table = Table::new(&["ID", "PATH"]);
        table.row(vec!["0".into(), "/dev/sdb (it does not exist any more)".into()]);
        assert_eq!(table.render(30), "ID  PATH\n0   /dev/sdb (it does not\n    exist any more)\n");
    }

    #[test]
    fn a_last_column_without_space_is_printed_below_its_row() {
        let mut table = Table::new(&["NAME", "PATH"]);
        table.row(vec!["a name of some length".into(), "/dev/disk/by-id/1 (gone)".into()]);
        assert_eq!(
            table.render(34),
            "NAME                   PATH\na name of some length\n    /dev/disk/by-id/1 (gone)\n"
        );
    }

    #[test]
    fn a_word_longer_than_a_line_is_not_broken() {
        let mut table = Table::new(&["ID", "PATH"]);
        table.row(vec!["0".into(), "/dev/disk/by-id/a-name-that-is-long (gone)".into()]);
        assert_eq!(table.render(34), "ID  PATH\n0\n    /dev/disk/by-id/a-name-that-is-long\n    (gone)\n");
    }

    #[test]
    fn a_line_of_a_page_is_wrapped_below_its_text() {
        let page = "title\n    warning        this region does not survive a power failure\n";
        assert_eq!(
            wrap_page(page, 48),
            "title\n    warning        this region does not survive\n                   a power failure\n"
        );
    }

    #[test]
    fn a_long_sentence_of_a_page_is_wrapped_too() {
        assert_eq!(wrap_page("one two three four five\n", 14), "one two\n    three four\n    five\n");
    }
}

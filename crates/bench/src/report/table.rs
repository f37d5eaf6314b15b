//! Tables for people and JSON for programs.

/// Rows of text under a heading. Columns are as wide as needed; the first is left-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(heading: &[&str]) -> Self {
        Self { rows: vec![heading.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Removes the columns that contain only dashes.
    pub fn drop_empty(&mut self) {
        let columns = self.rows.first().map_or(0, Vec::len);
        let filled = |column: usize| {
            let mut cells = self.rows.iter().skip(1).filter_map(|row| row.get(column));
            cells.any(|cell| cell != "-")
        };
        let filled: Vec<bool> = (0..columns).map(filled).collect();
        for row in &mut self.rows {
            let mut kept = filled.iter();
            row.retain(|_| kept.next().is_none_or(|kept| *kept));
        }
    }

    /// The heading and every row.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Prints the table.
    pub fn print(&self) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (i, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                line += &match column {
                    0 => format!("{cell:<width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            println!("{}", line.trim_end());
            if i == 0 {
                let whole = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
                println!("{}", "-".repeat(whole));
            }
        }
    }
}

/// Whether a figure meets its target, in words.
pub fn verdict(met: bool) -> String {
    if met { "met" } else { "MISSED" }.to_owned()
}

/// A number with about three digits.
pub fn short(number: f64) -> String {
    match number.abs() {
        _ if !number.is_finite() => "-".to_owned(),
        0.0..0.1 => format!("{number:.3}"),
        0.1..10.0 => format!("{number:.2}"),
        10.0..100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

/// A number, or a dash if it is missing.
pub fn optional(number: Option<f64>, show: impl Fn(f64) -> String) -> String {
    number.map_or("-".to_owned(), show)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_dashes_go_and_their_neighbours_stay() {
        let mut table = Table::new(&["a", "b", "c"]);
        for row in [["1", "-", "2"], ["-", "-", "3"]] {
            table.row(row.map(str::to_owned));
        }
        table.drop_empty();
        assert_eq!(table.rows(), [["a", "c"], ["1", "2"], ["-", "3"]]);
    }
}

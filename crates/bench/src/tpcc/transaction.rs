//! The five transactions of clause 2. Each function is one attempt: it begins, and commits or rolls
//! back; after an error, the caller rolls back the open transaction.

use std::fmt::Write as _;

use mysql::prelude::Queryable as _;
use mysql::{Conn, Error, Params, Value, params};

use super::schema::{DISTRICTS, Scale};
use super::values::{C_LAST_RUN, Values, cents, money};

/// The kind of transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    NewOrder,
    Payment,
    OrderStatus,
    Delivery,
    StockLevel,
}

/// A committed order, as its client knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    pub warehouse: u32,
    pub district: u32,
    pub number: u32,
    pub customer: u32,
    pub lines: u32,
}

/// A terminal: its connection, its warehouse, its random values.
pub struct Terminal {
    pub conn: Conn,
    pub scale: Scale,
    pub warehouse: u32,
    pub values: Values,
}

/// A line of an order that is being entered.
struct Line {
    item: u32,
    supply: u32,
    quantity: i64,
}

type Outcome<T> = Result<T, Error>;

/// A value that the database must have returned.
fn there<T>(found: Option<T>, what: &str) -> Outcome<T> {
    found.ok_or_else(|| Error::from(std::io::Error::other(format!("tpcc: no {what} found"))))
}

impl Terminal {
    /// Runs one transaction. Returns the order if it has committed one.
    pub fn run(&mut self, kind: Kind) -> Outcome<Option<Order>> {
        match kind {
            Kind::NewOrder => return self.new_order(),
            Kind::Payment => self.payment(),
            Kind::OrderStatus => self.order_status(),
            Kind::Delivery => self.delivery(),
            Kind::StockLevel => self.stock_level(),
        }?;
        Ok(None)
    }

    fn begin(&mut self) -> Outcome<()> {
        self.conn.query_drop("START TRANSACTION")
    }

    fn district(&mut self) -> u32 {
        self.values.within(1, u64::from(DISTRICTS)) as u32
    }

    /// Another warehouse than the terminal's own, or its own if there is only one.
    fn remote(&mut self) -> u32 {
        let all = self.scale.warehouses;
        if all == 1 {
            return self.warehouse;
        }
        let other = self.values.within(1, u64::from(all) - 1) as u32;
        if other >= self.warehouse { other + 1 } else { other }
    }

    /// Clause 2.4.1: the ordered items. One order in a hundred has an item that does not exist.
    fn order_lines(&mut self) -> (Vec<Line>, bool) {
        let count = self.values.within(5, 15);
        let fails = self.values.chance(1);
        let mut lines = Vec::new();
        for _ in 0..count {
            let item = self.values.item(self.scale.items);
            let supply = if self.values.chance(1) { self.remote() } else { self.warehouse };
            lines.push(Line { item, supply, quantity: self.values.within(1, 10) as i64 });
        }
        // Stock rows are locked in a fixed order, so that two orders seldom deadlock.
        lines.sort_by_key(|line| (line.supply, line.item));
        if fails && let Some(last) = lines.last_mut() {
            last.item = self.scale.items + 1;
        }
        (lines, fails)
    }

    /// Clause 2.4.2.
    fn new_order(&mut self) -> Outcome<Option<Order>> {
        let (w, d) = (self.warehouse, self.district());
        let c = self.values.customer(self.scale.customers);
        let (lines, _) = self.order_lines();
        self.begin()?;
        let conn = &mut self.conn;
        let tax: Option<String> =
            conn.exec_first("SELECT w_tax FROM warehouse WHERE w_id = ?", (w,))?;
        there(tax, "warehouse")?;
        let found: Option<(String, u32)> = conn.exec_first(
            "SELECT d_tax, d_next_o_id FROM district WHERE d_w_id = ? AND d_id = ? FOR UPDATE",
            (w, d),
        )?;
        let (_, number) = there(found, "district")?;
        conn.exec_drop(
            "UPDATE district SET d_next_o_id = d_next_o_id + 1 WHERE d_w_id = ? AND d_id = ?",
            (w, d),
        )?;
        let found: Option<(String, String, String)> = conn.exec_first(
            "SELECT c_discount, c_last, c_credit FROM customer \
             WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?",
            (w, d, c),
        )?;
        there(found, "customer")?;
        let all_local = lines.iter().all(|line| line.supply == w);
        conn.exec_drop(
            "INSERT INTO orders (o_id, o_d_id, o_w_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local) \
             VALUES (?, ?, ?, ?, NOW(), ?, ?)",
            (number, d, w, c, lines.len(), all_local),
        )?;
        conn.exec_drop(
            "INSERT INTO new_order (no_o_id, no_d_id, no_w_id) VALUES (?, ?, ?)",
            (number, d, w),
        )?;
        if !enter_lines(conn, [number, d, w], &lines)? {
            conn.query_drop("ROLLBACK")?;
            return Ok(None);
        }
        conn.query_drop("COMMIT")?;
        let lines = lines.len() as u32;
        Ok(Some(Order { warehouse: w, district: d, number, customer: c, lines }))
    }

    /// A customer by number (40 %) or by last name, the middle one of all with that name (60 %).
    fn customer(&mut self, w: u32, d: u32) -> Outcome<u32> {
        if self.values.chance(40) {
            return Ok(self.values.customer(self.scale.customers));
        }
        let last = self.values.last_name(C_LAST_RUN, self.scale.customers);
        let found: Vec<u32> = self.conn.exec(
            "SELECT c_id FROM customer WHERE c_w_id = ? AND c_d_id = ? AND c_last = ? \
             ORDER BY c_first",
            (w, d, last),
        )?;
        there(found.get(found.len().div_ceil(2).saturating_sub(1)).copied(), "customer of a name")
    }

    /// Clause 2.5.2.
    fn payment(&mut self) -> Outcome<()> {
        let (w, d) = (self.warehouse, self.district());
        let (c_w, c_d) =
            if self.values.chance(85) { (w, d) } else { (self.remote(), self.district()) };
        let amount = money(self.values.within(100, 500_000) as i64);
        self.begin()?;
        self.conn
            .exec_drop("UPDATE warehouse SET w_ytd = w_ytd + ? WHERE w_id = ?", (&amount, w))?;
        let address = "street_1, {}_street_2, {}_city, {}_state, {}_zip";
        let columns = |letter: &str| format!("{letter}_{}", address.replace("{}", letter));
        let name: Option<String> = self.conn.exec_first(
            format!(
                "SELECT CONCAT_WS(' ', w_name, {}) FROM warehouse WHERE w_id = ?",
                columns("w")
            ),
            (w,),
        )?;
        let w_name = there(name, "warehouse")?;
        self.conn.exec_drop(
            "UPDATE district SET d_ytd = d_ytd + ? WHERE d_w_id = ? AND d_id = ?",
            (&amount, w, d),
        )?;
        let name: Option<String> = self.conn.exec_first(
            format!(
                "SELECT CONCAT_WS(' ', d_name, {}) FROM district WHERE d_w_id = ? AND d_id = ?",
                columns("d")
            ),
            (w, d),
        )?;
        let d_name = there(name, "district")?;
        let c = self.customer(c_w, c_d)?;
        self.pay([c, c_d, c_w], [d, w], &amount)?;
        let first = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        let data = format!("{}    {}", first(&w_name), first(&d_name));
        self.conn.exec_drop(
            "INSERT INTO history (h_c_id, h_c_d_id, h_c_w_id, h_d_id, h_w_id, h_date, h_amount, \
             h_data) VALUES (?, ?, ?, ?, ?, NOW(), ?, ?)",
            (c, c_d, c_w, d, w, &amount, data),
        )?;
        self.conn.query_drop("COMMIT")
    }

    /// The customer's part of a payment; a customer with bad credit gets a note.
    fn pay(&mut self, [c, c_d, c_w]: [u32; 3], [d, w]: [u32; 2], amount: &str) -> Outcome<()> {
        let found: Option<(String, String, String)> = self.conn.exec_first(
            "SELECT c_credit, c_balance, c_data FROM customer \
             WHERE c_w_id = ? AND c_d_id = ? AND c_id = ? FOR UPDATE",
            (c_w, c_d, c),
        )?;
        let (credit, _, data) = there(found, "customer")?;
        let mut noted = data;
        if credit == "BC" {
            noted = format!("{c} {c_d} {c_w} {d} {w} {amount}|{noted}");
            noted.truncate(500);
        }
        let bad = credit == "BC";
        let set = if bad { ", c_data = :data" } else { "" };
        let mut given = vec![
            ("amount".to_owned(), Value::from(amount)),
            ("w".to_owned(), Value::from(c_w)),
            ("d".to_owned(), Value::from(c_d)),
            ("c".to_owned(), Value::from(c)),
        ];
        if bad {
            given.push(("data".to_owned(), Value::from(noted)));
        }
        self.conn.exec_drop(
            format!(
                "UPDATE customer SET c_balance = c_balance - :amount, \
                 c_ytd_payment = c_ytd_payment + :amount, c_payment_cnt = c_payment_cnt + 1{set} \
                 WHERE c_w_id = :w AND c_d_id = :d AND c_id = :c"
            ),
            Params::from(given),
        )
    }

    /// Clause 2.6.2.
    fn order_status(&mut self) -> Outcome<()> {
        let (w, d) = (self.warehouse, self.district());
        self.begin()?;
        let c = self.customer(w, d)?;
        let found: Option<(String, String, String)> = self.conn.exec_first(
            "SELECT c_balance, c_first, c_last FROM customer \
             WHERE c_w_id = ? AND c_d_id = ? AND c_id = ?",
            (w, d, c),
        )?;
        there(found, "customer")?;
        let found: Option<(u32, String, Option<u32>)> = self.conn.exec_first(
            "SELECT o_id, CAST(o_entry_d AS CHAR), o_carrier_id FROM orders \
             WHERE o_w_id = ? AND o_d_id = ? AND o_c_id = ? ORDER BY o_id DESC LIMIT 1",
            (w, d, c),
        )?;
        let (order, ..) = there(found, "order")?;
        let lines: Vec<(u32, u32, u32, String)> = self.conn.exec(
            "SELECT ol_i_id, ol_supply_w_id, ol_quantity, ol_amount FROM order_line \
             WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
            (w, d, order),
        )?;
        there((!lines.is_empty()).then_some(()), "line of an order")?;
        self.conn.query_drop("COMMIT")
    }

    /// Clause 2.7.4: the oldest new order of each district, in one transaction.
    fn delivery(&mut self) -> Outcome<()> {
        let (w, carrier) = (self.warehouse, self.values.within(1, 10));
        self.begin()?;
        for d in 1..=DISTRICTS {
            let conn = &mut self.conn;
            let order: Option<u32> = conn.exec_first(
                "SELECT no_o_id FROM new_order WHERE no_w_id = ? AND no_d_id = ? \
                 ORDER BY no_o_id LIMIT 1 FOR UPDATE",
                (w, d),
            )?;
            let Some(order) = order else { continue };
            let key = (w, d, order);
            conn.exec_drop(
                "DELETE FROM new_order WHERE no_w_id = ? AND no_d_id = ? AND no_o_id = ?",
                key,
            )?;
            let customer: Option<u32> = conn.exec_first(
                "SELECT o_c_id FROM orders WHERE o_w_id = ? AND o_d_id = ? AND o_id = ?",
                key,
            )?;
            let customer = there(customer, "order that was new")?;
            conn.exec_drop(
                "UPDATE orders SET o_carrier_id = ? WHERE o_w_id = ? AND o_d_id = ? AND o_id = ?",
                (carrier, w, d, order),
            )?;
            conn.exec_drop(
                "UPDATE order_line SET ol_delivery_d = NOW() \
                 WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
                key,
            )?;
            let sum: Option<String> = conn.exec_first(
                "SELECT SUM(ol_amount) FROM order_line \
                 WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id = ?",
                key,
            )?;
            conn.exec_drop(
                "UPDATE customer SET c_balance = c_balance + :sum, \
                 c_delivery_cnt = c_delivery_cnt + 1 \
                 WHERE c_w_id = :w AND c_d_id = :d AND c_id = :customer",
                params! { "sum" => there(sum, "lines of an order")?, w, d, customer },
            )?;
        }
        self.conn.query_drop("COMMIT")
    }

    /// Clause 2.8.2.
    fn stock_level(&mut self) -> Outcome<()> {
        let (w, d, threshold) = (self.warehouse, self.district(), self.values.within(10, 20));
        self.begin()?;
        let next: Option<u32> = self
            .conn
            .exec_first("SELECT d_next_o_id FROM district WHERE d_w_id = ? AND d_id = ?", (w, d))?;
        let next = there(next, "district")?;
        let count: Option<u64> = self.conn.exec_first(
            "SELECT COUNT(DISTINCT s_i_id) FROM order_line STRAIGHT_JOIN stock \
             ON s_w_id = ol_w_id AND s_i_id = ol_i_id \
             WHERE ol_w_id = ? AND ol_d_id = ? AND ol_o_id >= ? AND ol_o_id < ? \
             AND s_quantity < ?",
            (w, d, next.saturating_sub(20), next, threshold),
        )?;
        there(count, "count")?;
        self.conn.query_drop("COMMIT")
    }
}

/// Takes each line's goods from stock and inserts the lines; false if an item does not exist.
fn enter_lines(conn: &mut Conn, [o, d, w]: [u32; 3], lines: &[Line]) -> Outcome<bool> {
    let mut values: Vec<Value> = Vec::with_capacity(lines.len() * 9);
    for (number, line) in (1u32..).zip(lines) {
        let price: Option<(String, String, String)> = conn
            .exec_first("SELECT i_price, i_name, i_data FROM item WHERE i_id = ?", (line.item,))?;
        let Some((price, ..)) = price else { return Ok(false) };
        let found: Option<(i64, String, String)> = conn.exec_first(
            format!(
                "SELECT s_quantity, s_data, s_dist_{d:02} FROM stock \
                 WHERE s_w_id = ? AND s_i_id = ? FOR UPDATE"
            ),
            (line.supply, line.item),
        )?;
        let (quantity, _, info) = there(found, "stock")?;
        let left = quantity - line.quantity;
        let left = if left >= 10 { left } else { left + 91 };
        conn.exec_drop(
            "UPDATE stock SET s_quantity = ?, s_ytd = s_ytd + ?, s_order_cnt = s_order_cnt + 1, \
             s_remote_cnt = s_remote_cnt + ? WHERE s_w_id = ? AND s_i_id = ?",
            (left, line.quantity, line.supply != w, line.supply, line.item),
        )?;
        let amount = money(cents(&price) * line.quantity);
        values.extend([o, d, w, number, line.item, line.supply].map(Value::from));
        values.extend([Value::from(line.quantity), Value::from(amount), Value::from(info)]);
    }
    let mut statement = "INSERT INTO order_line (ol_o_id, ol_d_id, ol_w_id, ol_number, ol_i_id, \
                         ol_supply_w_id, ol_quantity, ol_amount, ol_dist_info) VALUES "
        .to_owned();
    for i in 0..lines.len() {
        let comma = if i == 0 { "" } else { ", " };
        write!(statement, "{comma}(?, ?, ?, ?, ?, ?, ?, ?, ?)").expect("memory takes it");
    }
    conn.exec_drop(statement, Params::Positional(values))?;
    Ok(true)
}

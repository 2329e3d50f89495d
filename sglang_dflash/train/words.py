"""Words that fill the prompt templates: plain data, one string a list, entries parted by semicolons."""

from __future__ import annotations


def _entries(text: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in text.split(";"))


TOPICS = _entries("""
photosynthesis; black holes; plate tectonics; the water cycle; DNA replication; vaccines; antibiotics; the immune
system; evolution by natural selection; gravity; magnetism; electric circuits; nuclear fusion; the periodic table;
acids and bases; chemical bonds; the greenhouse effect; ocean currents; coral reefs; volcanoes; earthquakes; glaciers;
tides; auroras; meteor showers; the phases of the moon; the solar system; the life cycle of stars; the Big Bang; dark
matter; comets; exoplanets; space telescopes; satellites; rockets; the speed of light; sound waves; lenses and
mirrors; lasers; rainbows; the food chain; pollination; honey bees; ant colonies; bird migration; hibernation;
camouflage; whales; octopuses; sharks; wolves; elephants; penguins; dinosaurs; fossils; mushrooms; rainforests;
deserts; wetlands; invasive species; composting; soil erosion; crop rotation; hydroponics; beekeeping; seed banks;
organic farming; deforestation; endangered animals; the human heart; the digestive system; how we sleep; how memory
works; the five senses; blood types; allergies; vitamins; the nervous system; muscles and exercise; bone health; the
common cold; first aid; dental care; stress; meditation; yoga; healthy breakfasts; drinking water; balanced diets;
screen time; mental health at work; learning a language; speed reading; the Roman Empire; ancient Egypt; the Silk
Road; the Renaissance; the Industrial Revolution; the French Revolution; the Vikings; the Black Death; the invention
of printing; the Age of Exploration; the Ottoman Empire; the Mongol Empire; the Maya; the Inca; the Meiji Restoration;
the First World War; the Second World War; the Cold War; the fall of the Berlin Wall; the space race; women's
suffrage; the abolition of slavery; the history of money; the history of medicine; the history of maps; castles;
pyramids; cathedrals; bridges; skyscrapers; lighthouses; canals; railways; bicycles; electric cars; airplanes;
submarines; container ships; traffic lights; roundabouts; public transport; city planning; urban parks; affordable
housing; recycling; solar panels; wind turbines; hydroelectric dams; batteries; heat pumps; insulation; power grids;
nuclear power; hydrogen; carbon taxes; water treatment; landfills; plastic in the sea; weather forecasts; hurricanes;
droughts; floods; wildfires; binary search; hash tables; recursion; sorting algorithms; linked lists; binary trees;
graphs; dynamic programming; caching; databases; SQL joins; database indexes; transactions; version control; unit
tests; code review; debugging; refactoring; regular expressions; compilers; interpreters; garbage collection;
operating systems; file systems; virtual memory; threads; deadlocks; the internet; web browsers; HTTP; cookies; DNS;
TCP and UDP; firewalls; passwords; two-factor authentication; public-key cryptography; blockchains; phishing; open
source; cloud computing; containers; load balancers; message queues; microservices; REST interfaces; JSON;
spreadsheets; machine learning; neural networks; decision trees; overfitting; reinforcement learning; language models;
recommender systems; computer vision; speech recognition; robots; drones; 3D printing; quantum computers; microchips;
touch screens; GPS; barcodes; digital cameras; e-books; video games; podcasts; prime numbers; fractions; percentages;
probability; averages; standard deviation; triangles; circles; the number pi; the Pythagorean theorem; logarithms;
derivatives; integrals; matrices; vectors; infinity; game theory; paradoxes; logic puzzles; supply and demand;
inflation; interest rates; taxes; budgets; saving for retirement; mortgages; insurance; stock markets; index funds;
small businesses; franchises; startups; marketing; branding; customer service; negotiation; job interviews; resumes;
remote work; meetings; time management; project plans; teamwork; leadership; feedback; conflict at work; trade unions;
minimum wages; free trade; globalization; democracy; constitutions; elections; courts; juries; human rights; free
speech; privacy; the United Nations; the European Union; refugees; poverty; microcredit; fair trade; volunteering;
philosophy; ethics; stoicism; utilitarianism; free will; happiness; friendship; courage; curiosity; creativity;
habits; motivation; procrastination; decision making; body language; public speaking; storytelling; poetry; novels;
short stories; fairy tales; myths of ancient Greece; Shakespeare; science fiction; detective stories; comic books;
newspapers; libraries; theater; opera; ballet; jazz; the blues; hip hop; orchestras; pianos; guitars; drums; choirs;
film music; cinema; animation; documentaries; photography; oil painting; watercolors; sculpture; pottery; origami;
knitting; woodworking; calligraphy; architecture; interior design; fashion; museums; street art; impressionism;
cubism; the colors of a painting; football; basketball; tennis; swimming; running a marathon; cycling; hiking; rock
climbing; skiing; surfing; chess; martial arts; the Olympic Games; board games; card games; gardening; houseplants;
pets; dogs; cats; parrots; goldfish; horses; camping; fishing; bird watching; stargazing; travel on a budget; packing
a suitcase; road trips; train journeys; backpacking; jet lag; bread; pasta; rice; sushi; soup; curry; chocolate;
cheese; coffee; tea; olive oil; spices; fermentation; ice cream; street food; vegetarian meals; baking a cake; kitchen
knives; food safety; school lunches; holiday dinners; picnics; birthday parties; weddings; moving house; raising
children; bedtime routines; homework; exams; note taking; online courses; universities; apprenticeships; teaching;
sign language; accents; proverbs; the alphabet; handwriting; emojis; calendars; clocks; leap years
""")

CODE_TASKS = _entries("""
reverses a string; checks whether a word is a palindrome; counts the vowels of a text; returns the n-th Fibonacci
number; computes the factorial of a number; tests whether a number is prime; lists all primes below n; finds the
greatest common divisor of two numbers; merges two sorted lists; removes duplicates from a list and keeps the order;
flattens a nested list; finds the second largest number of a list; sums the digits of a number; converts a number to
Roman numerals; converts a number to binary; counts how often each word occurs in a text; finds the longest word of a
sentence; checks whether two strings are anagrams; rotates a list by k places; finds the missing number from 1 to n;
computes the median of a list; computes a moving average; transposes a matrix; multiplies two matrices; sorts a list
with bubble sort; sorts a list with quicksort; searches a sorted list with binary search; checks whether brackets are
balanced; validates an email address; parses a CSV line; reads a file and counts its lines; finds all files of a
folder by their ending; groups people by their age; sorts records by two keys; finds the first character that does not
repeat; compresses a string by run lengths; encrypts a text with a Caesar cipher; generates a random password; rolls
two dice and shows the sum; plays rock, paper, scissors; simulates a coin toss; converts Celsius to Fahrenheit;
computes compound interest; computes the body mass index; finds leap years between two years; gives the days between
two dates; implements a stack; implements a queue with two stacks; implements a linked list; inserts into a binary
search tree; walks a tree level by level; finds the shortest path in a grid; counts islands in a grid; solves the
Tower of Hanoi; lists all permutations of a string; lists all subsets of a set; finds two numbers that add up to a
target; finds the longest common prefix; finds the longest increasing subsequence; computes the edit distance of two
words; makes change with the fewest coins; caches results of slow calls; retries a failing call three times; measures
how long a function takes; draws a triangle of stars; prints a multiplication table; splits a list into chunks of n;
turns camel case into snake case; capitalizes each word of a title; counts down from ten
""")

PROGRAMMING_LANGUAGES = _entries("""
Python; Python; Python; Python; JavaScript; JavaScript; TypeScript; Java; C; C++; C#; Go; Rust; Ruby; Kotlin; Swift;
PHP; SQL; Bash
""")

TONGUES = _entries("French; Spanish; German; Italian; Portuguese; Dutch; Swedish; Polish; Turkish; Latin")

SENTENCES = _entries("""
The train leaves at seven in the morning.; I would like a table for two, please.; My brother works in a hospital near
the river.; She has been reading the same book for three weeks.; We missed the bus because of the rain.; Could you
tell me where the station is?; The children are playing in the garden.; He bought fresh bread and two bottles of
milk.; It was the coldest winter in fifty years.; Nobody knew who had left the window open.; The museum is closed on
Mondays.; They want to travel around the world next year.; Our team finished the project a week early.; I forgot my
keys at the office again.; The cat sleeps on the warm roof all day.; Please send me the report before Friday.; The old
bridge was built by monks.; Her idea changed the way we think about cities.; This soup needs a little more salt.; The
meeting has been moved to Thursday afternoon.; He speaks quietly, but everyone listens.; A storm is coming, so close
the shutters.; The price of coffee has doubled since spring.; I have never seen so many stars.; You should drink more
water when it is hot.; The dog barked at the postman and ran away.; Thank you for your help with the move.; The
teacher explained the problem twice.; We grow tomatoes, beans and a few herbs.; His first novel took him ten years to
write.; The elevator is out of order, take the stairs.; Everyone clapped when the lights went out.; The package
arrived two days late.; She plays the violin in a small orchestra.; Most people here go to work by bicycle.; The lake
freezes over in January.; It is never too late to learn something new.; The shop around the corner sells excellent
cheese.; He apologized for the long delay.; The new law protects small farmers.; My phone battery is almost empty.;
They painted the kitchen in a light yellow.; Science is a way of asking careful questions.; The flight was cancelled
because of fog.; We laughed until our stomachs hurt.; The garden looks beautiful after the rain.; I will call you as
soon as I arrive.; The answer was hidden in plain sight.
""")

ROLES = _entries("""
a five-year-old child; a high school student; a college freshman; a busy manager; a retired teacher; a software
engineer; a nurse; a farmer; a tourist; a new employee; a skeptical friend; a journalist; a musician; an athlete; a
grandparent; a small business owner; a scientist; a beginner; an expert; a museum visitor; a team of volunteers; a
parent of twins; a shy student; an artist
""")

CHARACTERS = _entries("""
a lonely lighthouse keeper; a clever fox; a robot that is afraid of water; a young baker; two rival chess players; a
lost astronaut; a talking map; a retired detective; a dragon who collects teacups; a girl who can hear plants; a
street musician; a shy librarian; a ship's cook; a boy with a broken kite; an inventor of useless machines; a ghost
who hates the dark; a mountain guide; a pair of old boots; a night bus driver; a beekeeper in a big city; a snail in a
race; the last clockmaker; a nervous magician; a stray dog; a forgetful wizard; a letter carrier on an island; a
sleepy dragon; a queen without a castle; an honest thief; a gardener on the moon
""")

PLACES = _entries("""
Paris; Tokyo; Cairo; Rome; New York; Lisbon; Istanbul; Nairobi; Sydney; Mexico City; Berlin; Mumbai; Buenos Aires;
Reykjavik; Prague; Kyoto; Marrakesh; Vancouver; Athens; Singapore; Edinburgh; Havana; Seoul; Vienna; Cape Town; Lima;
Bangkok; Stockholm; Florence; Hanoi; the Alps; the Amazon; the Sahara; Patagonia; the Scottish Highlands; the Greek
islands; Iceland; Norway; New Zealand; Morocco
""")

PRODUCTS = _entries("""
a reusable water bottle; noise-cancelling headphones; a folding bicycle; a language learning app; a smart lamp;
handmade soap; running shoes; a weekly vegetable box; a travel backpack; a standing desk; a coffee grinder; a board
game about trains; a bird feeder; a meal planning app; a wool blanket; a solar charger; a children's science kit; a
pocket notebook; a bread machine; an online drawing course; a garden tool set; a silent keyboard; a repair service for
phones; a neighborhood bakery
""")

CONVERSIONS = _entries("""
kilometers to miles; miles to kilometers; Celsius to Fahrenheit; Fahrenheit to Celsius; kilograms to pounds; pounds to
kilograms; inches to centimeters; feet to meters; liters to gallons; ounces to grams; hours to minutes; minutes to
seconds; days to hours; weeks to days; meters to centimeters; grams to kilograms; square meters to square feet; knots
to kilometers per hour; bytes to bits; years to months
""")

# What each field of a template takes its words from. A field may end in 2: another word of the same list.
FIELDS: dict[str, tuple[str, ...]] = {
    "topic": TOPICS,
    "code_task": CODE_TASKS,
    "language": PROGRAMMING_LANGUAGES,
    "tongue": TONGUES,
    "sentence": SENTENCES,
    "role": ROLES,
    "character": CHARACTERS,
    "place": PLACES,
    "product": PRODUCTS,
    "conversion": CONVERSIONS,
    "few": _entries("three; four; five; six; seven; eight; ten; twelve"),
    "number": tuple(str(n) for n in range(2, 1000, 7)),
}

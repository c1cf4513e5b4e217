"""The facts that the demo model learns: tables of countries, words and the calendar."""

from __future__ import annotations

from dataclasses import dataclass

_COUNTRIES = {
    "Europe": """Albania:Tirana Andorra:Andorra_la_Vella Austria:Vienna Belarus:Minsk Belgium:Brussels
        Bosnia_and_Herzegovina:Sarajevo Bulgaria:Sofia Croatia:Zagreb Cyprus:Nicosia the_Czech_Republic:Prague
        Denmark:Copenhagen Estonia:Tallinn Finland:Helsinki France:Paris Germany:Berlin Greece:Athens
        Hungary:Budapest Iceland:Reykjavik Ireland:Dublin Italy:Rome Kosovo:Pristina Latvia:Riga
        Liechtenstein:Vaduz Lithuania:Vilnius Luxembourg:Luxembourg_City Malta:Valletta Moldova:Chisinau
        Monaco:Monaco Montenegro:Podgorica the_Netherlands:Amsterdam North_Macedonia:Skopje Norway:Oslo
        Poland:Warsaw Portugal:Lisbon Romania:Bucharest Russia:Moscow San_Marino:San_Marino Serbia:Belgrade
        Slovakia:Bratislava Slovenia:Ljubljana Spain:Madrid Sweden:Stockholm Switzerland:Bern Ukraine:Kyiv
        the_United_Kingdom:London Vatican_City:Vatican_City""",
    "Asia": """Afghanistan:Kabul Armenia:Yerevan Azerbaijan:Baku Bahrain:Manama Bangladesh:Dhaka Bhutan:Thimphu
        Brunei:Bandar_Seri_Begawan Cambodia:Phnom_Penh China:Beijing Georgia:Tbilisi India:New_Delhi
        Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Israel:Jerusalem Japan:Tokyo Jordan:Amman Kazakhstan:Astana
        Kuwait:Kuwait_City Kyrgyzstan:Bishkek Laos:Vientiane Lebanon:Beirut Malaysia:Kuala_Lumpur
        the_Maldives:Male Mongolia:Ulaanbaatar Myanmar:Naypyidaw Nepal:Kathmandu North_Korea:Pyongyang
        Oman:Muscat Pakistan:Islamabad the_Philippines:Manila Qatar:Doha Saudi_Arabia:Riyadh
        Singapore:Singapore South_Korea:Seoul Sri_Lanka:Sri_Jayawardenepura_Kotte Syria:Damascus Taiwan:Taipei
        Tajikistan:Dushanbe Thailand:Bangkok Timor-Leste:Dili Turkey:Ankara Turkmenistan:Ashgabat
        the_United_Arab_Emirates:Abu_Dhabi Uzbekistan:Tashkent Vietnam:Hanoi Yemen:Sanaa""",
    "Africa": """Algeria:Algiers Angola:Luanda Benin:Porto-Novo Botswana:Gaborone Burkina_Faso:Ouagadougou
        Burundi:Gitega Cameroon:Yaounde Cape_Verde:Praia the_Central_African_Republic:Bangui Chad:N'Djamena
        the_Comoros:Moroni the_Democratic_Republic_of_the_Congo:Kinshasa the_Republic_of_the_Congo:Brazzaville
        Djibouti:Djibouti Egypt:Cairo Equatorial_Guinea:Malabo Eritrea:Asmara Eswatini:Mbabane
        Ethiopia:Addis_Ababa Gabon:Libreville the_Gambia:Banjul Ghana:Accra Guinea:Conakry Guinea-Bissau:Bissau
        Ivory_Coast:Yamoussoukro Kenya:Nairobi Lesotho:Maseru Liberia:Monrovia Libya:Tripoli
        Madagascar:Antananarivo Malawi:Lilongwe Mali:Bamako Mauritania:Nouakchott Mauritius:Port_Louis
        Morocco:Rabat Mozambique:Maputo Namibia:Windhoek Niger:Niamey Nigeria:Abuja Rwanda:Kigali
        Sao_Tome_and_Principe:Sao_Tome Senegal:Dakar the_Seychelles:Victoria Sierra_Leone:Freetown
        Somalia:Mogadishu South_Africa:Pretoria South_Sudan:Juba Sudan:Khartoum Tanzania:Dodoma Togo:Lome
        Tunisia:Tunis Uganda:Kampala Zambia:Lusaka Zimbabwe:Harare""",
    "North America": """Antigua_and_Barbuda:Saint_John's the_Bahamas:Nassau Barbados:Bridgetown Belize:Belmopan
        Canada:Ottawa Costa_Rica:San_Jose Cuba:Havana Dominica:Roseau the_Dominican_Republic:Santo_Domingo
        El_Salvador:San_Salvador Grenada:Saint_George's Guatemala:Guatemala_City Haiti:Port-au-Prince
        Honduras:Tegucigalpa Jamaica:Kingston Mexico:Mexico_City Nicaragua:Managua Panama:Panama_City
        Saint_Kitts_and_Nevis:Basseterre Saint_Lucia:Castries Saint_Vincent_and_the_Grenadines:Kingstown
        Trinidad_and_Tobago:Port_of_Spain the_United_States:Washington""",
    "South America": """Argentina:Buenos_Aires Bolivia:Sucre Brazil:Brasilia Chile:Santiago Colombia:Bogota
        Ecuador:Quito Guyana:Georgetown Paraguay:Asuncion Peru:Lima Suriname:Paramaribo Uruguay:Montevideo
        Venezuela:Caracas""",
    "Oceania": """Australia:Canberra Fiji:Suva Kiribati:Tarawa the_Marshall_Islands:Majuro Micronesia:Palikir
        Nauru:Yaren New_Zealand:Wellington Palau:Ngerulmud Papua_New_Guinea:Port_Moresby Samoa:Apia
        the_Solomon_Islands:Honiara Tonga:Nuku'alofa Tuvalu:Funafuti Vanuatu:Port_Vila""",
}

_OPPOSITES = """hot:cold big:small tall:short fast:slow old:young up:down left:right day:night black:white
    happy:sad rich:poor hard:soft wet:dry open:closed full:empty light:dark high:low near:far early:late
    good:bad strong:weak clean:dirty loud:quiet heavy:light thick:thin wide:narrow deep:shallow
    smooth:rough sharp:dull sweet:bitter true:false right:wrong begin:end buy:sell push:pull win:lose
    give:take come:go love:hate laugh:cry float:sink rise:fall always:never before:after inside:outside
    above:below first:last more:less many:few brave:cowardly kind:cruel polite:rude safe:dangerous
    simple:complex easy:difficult cheap:expensive alive:dead awake:asleep tight:loose wild:tame
    modern:ancient public:private north:south east:west summer:winter friend:enemy victory:defeat
    accept:refuse arrive:depart build:destroy borrow:lend create:destroy increase:decrease remember:forget
    arrival:departure question:answer success:failure war:peace smile:frown"""


@dataclass(frozen=True)
class Country:
    """A country, with the article of its name if it has one."""

    article: str
    name: str
    capital: str
    continent: str

    @property
    def phrase(self) -> str:
        """Return the name inside a sentence: 'France', 'the Netherlands'."""
        return self.article + self.name


def _parse_countries() -> tuple[Country, ...]:
    countries = []
    for continent, entries in _COUNTRIES.items():
        for entry in entries.split():
            phrase, capital = entry.replace("_", " ").split(":")
            article = "the " if phrase.startswith("the ") else ""
            countries.append(Country(article, phrase.removeprefix("the "), capital, continent))
    return tuple(countries)


COUNTRIES = _parse_countries()
COUNTRY_BY_NAME = {country.name: country for country in COUNTRIES}
# Lists are drawn from these alone: a list shows the same few dozen pairs again and again.
WELL_KNOWN = tuple(
    COUNTRY_BY_NAME[name]
    for name in (
        "France,Germany,Italy,Spain,Portugal,Greece,Austria,Poland,Sweden,Norway,Finland,Denmark,Ireland,"
        "Japan,China,India,Thailand,Vietnam,South Korea,Nepal,Egypt,Kenya,Morocco,Ghana,Nigeria,Ethiopia,"
        "Canada,Mexico,Cuba,Jamaica,United States,Brazil,Argentina,Peru,Chile,Colombia,Australia,New Zealand,Fiji"
    ).split(",")
)
ALIASES = {
    "United States": ("the USA", "the US", "the United States of America"),
    "United Kingdom": ("the UK", "Great Britain"),
    "Czech Republic": ("Czechia",),
    "Ivory Coast": ("Cote d'Ivoire",),
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = tuple("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split())


def _parse_opposites() -> dict[str, str]:
    pairs = [entry.split(":") for entry in _OPPOSITES.split()]
    table: dict[str, str] = {}
    for word, opposite in pairs:
        table[word] = opposite
    for word, opposite in pairs:
        table.setdefault(opposite, word)
    return table


OPPOSITES = _parse_opposites()

# cities for tool calls, besides the capitals
CITIES = tuple(
    "New York,Los Angeles,Chicago,San Francisco,Boston,Seattle,Toronto,Vancouver,Sydney,Melbourne,Mumbai,Shanghai,"
    "Hong Kong,Osaka,Kyoto,Barcelona,Munich,Hamburg,Milan,Naples,Venice,Lyon,Nice,Geneva,Zurich,Istanbul,Dubai,"
    "Rio de Janeiro,Lagos,Casablanca,Manchester,Edinburgh,Rotterdam,Krakow,Porto".split(",")
)

# No number in a sum or a difference is larger.
SUM_LIMIT = 20
